//! The forward pass for serving: a fixed number of slots, each with its keys and values kept between calls.
//!
//! A slot holds one conversation. [`Decoder::prefill`] appends any number of tokens to several slots at once and gives the logits
//! after the last one; [`Decoder::decode`] appends one token to each of many slots. Which tokens a slot holds is the caller's to
//! know: every row says at which position it starts, and what the slot held from there on is overwritten.

use tch::{Device, Kind, Tensor};

use crate::llama::{Rotary, linear};
use crate::{Llama, LlamaConfig, ModelError};

/// Tokens to append to one slot.
#[derive(Debug, Clone)]
pub struct PrefillRow<'a> {
    /// The slot.
    pub slot: usize,
    /// How many tokens of the slot are kept: the position of the first new one.
    pub start: usize,
    /// The new tokens; at least one.
    pub ids: &'a [i32],
}

/// One token to append to one slot.
#[derive(Debug, Clone, Copy)]
pub struct DecodeRow {
    /// The slot.
    pub slot: usize,
    /// The token's position: how many tokens the slot holds before it.
    pub position: usize,
    /// The token.
    pub id: i32,
}

#[derive(Debug)]
struct FusedLayer {
    input_norm: Tensor,
    post_attention_norm: Tensor,
    /// `[(H + 2·KV)·W, D]`
    qkv: Tensor,
    o: Tensor,
    /// `[2·F, D]`
    gate_up: Tensor,
    down: Tensor,
    /// `[slots·KV·(max_len + 1), W]`: the last position of a slot takes what must not be kept.
    keys: Tensor,
    values: Tensor,
}

/// A model's weights, fused and frozen, with a key-value cache.
#[derive(Debug)]
pub struct Decoder {
    config: LlamaConfig,
    slots: usize,
    max_len: usize,
    embedding: Tensor,
    layers: Vec<FusedLayer>,
    final_norm: Tensor,
    output: Tensor,
    rotary: Rotary,
}

impl Decoder {
    /// Copies a model's weights and allocates a cache of `slots` rows of `max_len` tokens. Later changes of the model do not reach
    /// the decoder.
    pub fn new(model: &Llama, slots: usize, max_len: usize) -> Result<Self, ModelError> {
        let config = model.config().clone();
        if slots == 0 || max_len == 0 || max_len as i64 > config.max_position_embeddings {
            return Err(ModelError::Input(format!(
                "a cache of {slots} slots of {max_len} tokens: both must be positive, and max_position_embeddings is {}",
                config.max_position_embeddings
            )));
        }
        let _guard = tch::no_grad_guard();
        let frozen = |t: &Tensor| t.detach().copy();
        let cells = slots as i64 * config.num_key_value_heads * (max_len as i64 + 1);
        let cache = || huge_zeros(&[cells, config.head_dim], model.device());
        let layers = model
            .layers
            .iter()
            .map(|layer| {
                Ok(FusedLayer {
                    input_norm: frozen(&layer.input_norm),
                    post_attention_norm: frozen(&layer.post_attention_norm),
                    qkv: Tensor::f_cat(&[&layer.q, &layer.k, &layer.v], 0)?.detach(),
                    o: frozen(&layer.o),
                    gate_up: Tensor::f_cat(&[&layer.gate, &layer.up], 0)?.detach(),
                    down: frozen(&layer.down),
                    keys: cache()?,
                    values: cache()?,
                })
            })
            .collect::<Result<_, ModelError>>()?;
        Ok(Self {
            slots,
            max_len,
            embedding: frozen(&model.embedding),
            layers,
            final_norm: frozen(&model.final_norm),
            output: frozen(&model.output),
            rotary: Rotary::new(&config, max_len as i64 + 1, model.device()),
            config,
        })
    }

    /// The model's shape.
    pub const fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// How many conversations the cache holds.
    pub const fn slots(&self) -> usize {
        self.slots
    }

    /// How many tokens a slot holds.
    pub const fn max_len(&self) -> usize {
        self.max_len
    }

    /// Appends tokens to slots, each slot at most once, and returns the logits after each row's last token: `[rows, V]`.
    pub fn prefill(&mut self, rows: &[PrefillRow<'_>]) -> Result<Tensor, ModelError> {
        for row in rows {
            self.check(row.slot, row.start, row.ids)?;
        }
        let _guard = tch::no_grad_guard();
        let n = rows.len() as i64;
        let time = rows.iter().map(|r| r.ids.len()).max().unwrap_or_default();
        let reach = rows
            .iter()
            .map(|r| r.start + r.ids.len())
            .max()
            .unwrap_or_default();
        let mut ids = vec![0_i64; rows.len() * time];
        // Filled-up places take the position that is never read.
        let mut positions = vec![self.max_len as i64; rows.len() * time];
        let mut last = Vec::with_capacity(rows.len());
        for (r, row) in rows.iter().enumerate() {
            for (t, id) in row.ids.iter().enumerate() {
                ids[r * time + t] = i64::from(*id);
                positions[r * time + t] = (row.start + t) as i64;
            }
            last.push((r * time + row.ids.len() - 1) as i64);
        }
        let slots: Vec<i64> = rows.iter().map(|r| r.slot as i64).collect();
        let first = slots.first().copied().unwrap_or_default();
        let contiguous = slots
            .iter()
            .zip(first..)
            .all(|(slot, expected)| *slot == expected);
        let slot_of_token = slots
            .iter()
            .flat_map(|slot| std::iter::repeat_n(*slot, time));
        let cells = self.cells(slot_of_token.zip(positions.iter().copied()));
        let read = if contiguous {
            Slots::Runs(vec![Run {
                slot: first,
                first: 0,
                rows: n,
                reach: reach as i64,
            }])
        } else {
            Slots::List(self.on_device(&slots))
        };
        let last = self.on_device(&last);
        let hidden = self.forward(&Step {
            ids: self.on_device(&ids),
            positions: self.on_device(&positions),
            cells: self.on_device(&cells),
            rows: n,
            time: time as i64,
            reach: reach as i64,
            read,
        })?;
        Ok(linear(&hidden.index_select(0, &last), &self.output))
    }

    /// Appends one token to each row's slot (each slot at most once, rows in ascending order of slot), and returns the logits after
    /// it: `[rows, V]`, in the order of the rows. Slots without a row are left as they are.
    pub fn decode(&mut self, rows: &[DecodeRow]) -> Result<Tensor, ModelError> {
        for row in rows {
            self.check(row.slot, row.position, &[row.id])?;
        }
        if rows.is_empty() {
            return Err(ModelError::Input("no rows to decode".into()));
        }
        if !rows.is_sorted_by(|a, b| a.slot < b.slot) {
            return Err(ModelError::Input(
                "rows must come in ascending order of slot".into(),
            ));
        }
        let _guard = tch::no_grad_guard();
        let (mut ids, mut slots, mut positions, mut wanted) = (vec![], vec![], vec![], vec![]);
        let mut runs: Vec<Run> = Vec::new();
        for row in rows {
            let reach = row.position as i64 + 1;
            match runs.last_mut() {
                // A small gap is cheaper to compute than to leave out.
                Some(run) if row.slot as i64 - (run.slot + run.rows) <= SMALL_GAP => {
                    for slot in run.slot + run.rows..row.slot as i64 {
                        ids.push(0);
                        slots.push(slot);
                        positions.push(self.max_len as i64);
                    }
                    run.rows = row.slot as i64 + 1 - run.slot;
                    run.reach = run.reach.max(reach);
                }
                _ => runs.push(Run {
                    slot: row.slot as i64,
                    first: ids.len() as i64,
                    rows: 1,
                    reach,
                }),
            }
            wanted.push(ids.len() as i64);
            ids.push(i64::from(row.id));
            slots.push(row.slot as i64);
            positions.push(row.position as i64);
        }
        let cells = self.cells(slots.into_iter().zip(positions.iter().copied()));
        let hidden = self.forward(&Step {
            ids: self.on_device(&ids),
            positions: self.on_device(&positions),
            cells: self.on_device(&cells),
            rows: ids.len() as i64,
            time: 1,
            reach: runs.iter().map(|run| run.reach).max().unwrap_or_default(),
            read: Slots::Runs(runs),
        })?;
        let hidden = if wanted.len() == ids.len() {
            hidden
        } else {
            hidden.index_select(0, &self.on_device(&wanted))
        };
        Ok(linear(&hidden, &self.output))
    }

    /// Makes slot `to` hold the first `len` tokens that slot `from` holds.
    pub fn copy_prefix(&mut self, from: usize, to: usize, len: usize) -> Result<(), ModelError> {
        if from >= self.slots || to >= self.slots || len > self.max_len {
            return Err(ModelError::Input(format!(
                "copying {len} tokens from slot {from} to slot {to} of {} slots of {} tokens",
                self.slots, self.max_len
            )));
        }
        if from == to || len == 0 {
            return Ok(());
        }
        let _guard = tch::no_grad_guard();
        let heads = self.config.num_key_value_heads;
        let shape = [
            self.slots as i64,
            heads,
            self.max_len as i64 + 1,
            self.config.head_dim,
        ];
        for layer in &self.layers {
            for cache in [&layer.keys, &layer.values] {
                let cache = cache.view(shape);
                let place = |slot: usize| cache.get(slot as i64).narrow(1, 0, len as i64);
                place(to).f_copy_(&place(from))?;
            }
        }
        Ok(())
    }

    fn check(&self, slot: usize, start: usize, ids: &[i32]) -> Result<(), ModelError> {
        let vocab = self.config.vocab_size;
        if slot >= self.slots {
            return Err(ModelError::Input(format!("slot {slot} of {}", self.slots)));
        }
        if ids.is_empty() {
            return Err(ModelError::Input(format!(
                "slot {slot}: no tokens to append"
            )));
        }
        if start + ids.len() > self.max_len {
            return Err(ModelError::Input(format!(
                "slot {slot}: {start} + {} tokens do not fit into {}",
                ids.len(),
                self.max_len
            )));
        }
        match ids.iter().find(|id| !(0..vocab).contains(&i64::from(**id))) {
            Some(id) => Err(ModelError::Input(format!(
                "token id {id} is outside the vocabulary of {vocab}"
            ))),
            None => Ok(()),
        }
    }

    /// Where keys and values of (slot, position) pairs go in the cache: one index for each key-value head.
    fn cells(&self, places: impl Iterator<Item = (i64, i64)>) -> Vec<i64> {
        let (heads, length) = (self.config.num_key_value_heads, self.max_len as i64 + 1);
        places
            .flat_map(|(slot, position)| {
                (0..heads).map(move |head| (slot * heads + head) * length + position)
            })
            .collect()
    }

    fn on_device(&self, values: &[i64]) -> Tensor {
        Tensor::from_slice(values).to_device(self.embedding.device())
    }

    /// Runs `rows × time` tokens through the layers; returns hidden states after the last norm, `[rows·time, D]`.
    fn forward(&mut self, step: &Step) -> Result<Tensor, ModelError> {
        let config = &self.config;
        let (heads, kv_heads, width) = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        );
        let (group, tokens) = (heads / kv_heads, step.rows * step.time);
        let norm = |x: &Tensor, weight: &Tensor| {
            x.rms_norm(config.hidden_size, Some(weight), config.rms_norm_eps)
        };
        let cos = self
            .rotary
            .cos
            .index_select(0, &step.positions)
            .unsqueeze(1);
        let sin = self
            .rotary
            .sin
            .index_select(0, &step.positions)
            .unsqueeze(1);
        // A key may be seen from its own position on. [rows, 1, time, reach]
        let keys_at = Tensor::arange(step.reach, (Kind::Int64, step.positions.device()));
        let mask = keys_at
            .less_equal_tensor(&step.positions.view([step.rows, 1, step.time, 1]))
            .logical_not()
            .to_kind(Kind::Float)
            * -1e30;
        // Query heads that share a key head are treated as further queries of it. [rows, 1, group·time, reach]
        let mask = if step.time == 1 || group == 1 {
            mask
        } else {
            mask.repeat([1, 1, group, 1])
        };
        let mut x = self.embedding.index_select(0, &step.ids);
        for layer in &mut self.layers {
            let qkv = linear(&norm(&x, &layer.input_norm), &layer.qkv).view([
                tokens,
                heads + 2 * kv_heads,
                width,
            ]);
            let turned = qkv.narrow(1, 0, heads + kv_heads);
            let mut qk = &turned * &cos;
            let qk = qk.addcmul_(&turned.roll(width / 2, -1), &sin);
            let (new_keys, new_values) = (
                qk.narrow(1, heads, kv_heads),
                qkv.narrow(1, heads + kv_heads, kv_heads),
            );
            drop(
                layer
                    .keys
                    .f_index_copy_(0, &step.cells, &new_keys.reshape([-1, width]))?,
            );
            drop(
                layer
                    .values
                    .f_index_copy_(0, &step.cells, &new_values.reshape([-1, width]))?,
            );
            // [rows, KV, group·time, W]
            let q = qk
                .narrow(1, 0, heads)
                .view([step.rows, step.time, kv_heads, group, width])
                .permute([0, 2, 3, 1, 4])
                .reshape([step.rows, kv_heads, group * step.time, width]);
            let shape = [self.slots as i64, kv_heads, self.max_len as i64 + 1, width];
            let (keys, values) = (layer.keys.view(shape), layer.values.view(shape));
            let attend = |q: &Tensor, keys: &Tensor, values: &Tensor, mask: &Tensor| {
                Tensor::f_scaled_dot_product_attention(
                    q,
                    keys,
                    values,
                    Some(mask),
                    0.0,
                    false,
                    None,
                    false,
                )
            };
            let attended = match &step.read {
                Slots::List(slots) => {
                    let pick =
                        |cache: &Tensor| cache.narrow(2, 0, step.reach).index_select(0, slots);
                    attend(&q, &pick(&keys), &pick(&values), &mask)?
                }
                Slots::Runs(runs) => {
                    let parts = runs
                        .iter()
                        .map(|run| {
                            let pick = |cache: &Tensor| {
                                cache.narrow(0, run.slot, run.rows).narrow(2, 0, run.reach)
                            };
                            let rows = |t: &Tensor| t.narrow(0, run.first, run.rows);
                            attend(
                                &rows(&q),
                                &pick(&keys),
                                &pick(&values),
                                &rows(&mask).narrow(3, 0, run.reach),
                            )
                        })
                        .collect::<Result<Vec<_>, _>>()?;
                    match parts.as_slice() {
                        [one] => one.shallow_clone(),
                        many => Tensor::f_cat(many, 0)?,
                    }
                }
            };
            let attended = attended
                .view([step.rows, kv_heads, group, step.time, width])
                .permute([0, 3, 1, 2, 4])
                .reshape([tokens, heads * width]);
            x += linear(&attended, &layer.o);
            let gate_up = linear(&norm(&x, &layer.post_attention_norm), &layer.gate_up);
            let gate = gate_up.narrow(1, 0, config.intermediate_size);
            let up = gate_up.narrow(1, config.intermediate_size, config.intermediate_size);
            x += linear(&(gate.silu() * up), &layer.down);
        }
        Ok(norm(&x, &self.final_norm))
    }
}

/// Zeros on huge pages where the system has them: a step walks through the whole cache, and with ordinary pages much of its time
/// goes into finding them.
fn huge_zeros(shape: &[i64], device: Device) -> Result<Tensor, ModelError> {
    let mut zeros = Tensor::f_empty(shape, (Kind::Float, device))?;
    #[cfg(target_os = "linux")]
    if device == Device::Cpu {
        const PAGE: usize = 2 << 20;
        let start = zeros.data_ptr() as usize;
        let end = (start + zeros.numel() * size_of::<f32>()) / PAGE * PAGE;
        let start = start.next_multiple_of(PAGE);
        if start < end {
            // SAFETY: the range lies inside the tensor's own memory. The call changes no content, only how pages are mapped, and a
            // refusal leaves ordinary pages.
            unsafe { libc::madvise(start as *mut libc::c_void, end - start, libc::MADV_HUGEPAGE) };
        }
    }
    Ok(zeros.f_zero_()?)
}

/// Idle slots between two active ones up to which both are read as one stretch.
const SMALL_GAP: i64 = 1;

/// Neighbouring slots.
struct Run {
    slot: i64,
    /// The step's row that stands for the first slot.
    first: i64,
    rows: i64,
    /// How many positions of these slots are looked at.
    reach: i64,
}

/// Which slots' caches a step reads: neighbours are read in place, a list is copied out.
enum Slots {
    Runs(Vec<Run>),
    List(Tensor),
}

struct Step {
    /// `[rows·time]`
    ids: Tensor,
    /// `[rows·time]`
    positions: Tensor,
    /// `[rows·time·KV]`
    cells: Tensor,
    rows: i64,
    time: i64,
    /// How many positions of each slot are looked at, at most.
    reach: i64,
    read: Slots,
}
