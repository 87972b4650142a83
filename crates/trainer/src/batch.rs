//! From sequences to batches: which sequences go together, and the tensors of one pass.
//!
//! An optimiser step takes sequences worth a budget of tokens, padding included, so memory and time per step are even whatever the
//! lengths. Sequences of similar length share a step: the units (single sequences, or all of a group) are shuffled, cut into pools
//! of sixteen steps' worth, sorted by length inside a pool, packed, and the packed steps shuffled again. The order depends on seed
//! and epoch only, so a position in it is all that a resumed run needs. Padding is on the right; with causal attention nothing
//! looks at it. No step mixes sequences of different version keys unless allowed.

use std::collections::BTreeMap;

use rand::SeedableRng;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;
use tch::{Device, Tensor};

use crate::losses::contrastive::PairIndex;
use crate::sequence::Sequence;

/// Steps' worth of units that are sorted by length together.
const POOL_STEPS: usize = 16;

/// What planning needs to know of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Number of ids.
    pub len: usize,
    /// Sequences of one unit stay in one step.
    pub unit: usize,
    /// Sequences of different versions stay apart.
    pub version: u32,
}

/// How sequences are packed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packing {
    /// Tokens of a step, padding included.
    pub batch_tokens: usize,
    /// Tokens of a pass, padding included.
    pub micro_tokens: usize,
    /// Ignore versions.
    pub allow_mixed: bool,
}

/// One optimiser step: its passes, each a list of sequence indices.
pub type Step = Vec<Vec<usize>>;

/// The steps of one epoch, in order. Every sequence occurs exactly once.
pub fn plan(shapes: &[Shape], packing: Packing, seed: u64, epoch: u32) -> Vec<Step> {
    let mut units: BTreeMap<(u32, usize), Vec<usize>> = BTreeMap::new();
    for (index, shape) in shapes.iter().enumerate() {
        let version = if packing.allow_mixed {
            0
        } else {
            shape.version
        };
        units.entry((version, shape.unit)).or_default().push(index);
    }
    let mut by_version: BTreeMap<u32, Vec<Vec<usize>>> = BTreeMap::new();
    for ((version, _), unit) in units {
        by_version.entry(version).or_default().push(unit);
    }

    let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (u64::from(epoch) << 32) ^ 0x7261_696e_6564);
    let longest = |unit: &[usize]| unit.iter().map(|&i| shapes[i].len).max().unwrap_or(0);
    let mut steps = Vec::new();
    for mut units in by_version.into_values() {
        units.shuffle(&mut rng);
        let mut waiting = units.into_iter().peekable();
        let mut pool: Vec<Vec<usize>> = Vec::new();
        while waiting.peek().is_some() {
            let mut tokens: usize = pool.iter().map(|u| u.len() * longest(u)).sum();
            while tokens < POOL_STEPS * packing.batch_tokens
                && let Some(unit) = waiting.next()
            {
                tokens += unit.len() * longest(&unit);
                pool.push(unit);
            }
            pool.sort_by_key(|unit| longest(unit));
            let mut packed = pack(std::mem::take(&mut pool), packing.batch_tokens, &longest);
            // A step that is not full waits for the next pool, so that only the last one of an epoch can be small.
            if waiting.peek().is_some()
                && packed.len() > 1
                && let Some(last) = packed.pop()
            {
                pool = last;
            }
            steps.extend(packed);
        }
        steps.extend((!pool.is_empty()).then_some(pool));
    }
    steps.shuffle(&mut rng);
    steps
        .into_iter()
        .map(|units| passes(units, packing.micro_tokens, &longest))
        .collect()
}

/// Packs units into lists whose padded size stays within `budget`; a unit above the budget is alone.
fn pack(
    units: Vec<Vec<usize>>,
    budget: usize,
    longest: &dyn Fn(&[usize]) -> usize,
) -> Vec<Vec<Vec<usize>>> {
    let mut packed: Vec<Vec<Vec<usize>>> = Vec::new();
    let (mut count, mut width) = (0, 0);
    for unit in units {
        let new_width = width.max(longest(&unit));
        match packed.last_mut() {
            Some(last) if (count + unit.len()) * new_width <= budget => {
                count += unit.len();
                width = new_width;
                last.push(unit);
            }
            _ => {
                (count, width) = (unit.len(), longest(&unit));
                packed.push(vec![unit]);
            }
        }
    }
    packed
}

/// Cuts a step into passes; a unit is split only where it is larger than a pass.
fn passes(units: Vec<Vec<usize>>, budget: usize, longest: &dyn Fn(&[usize]) -> usize) -> Step {
    let fitting = units.into_iter().flat_map(|unit| {
        if unit.len() * longest(&unit) <= budget {
            vec![unit]
        } else {
            let mut singles: Vec<Vec<usize>> = unit.into_iter().map(|i| vec![i]).collect();
            singles.sort_by_key(|single| longest(single));
            singles
        }
    });
    pack(fitting.collect(), budget, longest)
        .into_iter()
        .map(|units| units.into_iter().flatten().collect())
        .collect()
}

/// The tensors of one pass over `B` sequences, the longest of `T` ids, with `N` own tokens together.
#[derive(Debug)]
pub struct Batch {
    /// Ids, padded on the right, `[B, T]` i64.
    pub ids: Tensor,
    /// Where in the flattened `[B·T]` each own token is predicted from (the position before it), `[N]` i64.
    pub select: Tensor,
    /// The own tokens, `[N]` i64.
    pub targets: Tensor,
    /// Coefficient of each own token, `[N]`; see [`crate::losses::coefficients`].
    pub coefficient: Tensor,
    /// Advantage of each own token's episode, `[N]`.
    pub advantage: Tensor,
    /// Behaviour log-probabilities, `[N]`; present if all sequences have them.
    pub behaviour: Option<Tensor>,
    /// Reference log-probabilities, `[N]`; present if all sequences have them.
    pub reference: Option<Tensor>,
    /// Sampling temperatures, `[N, 1]`; absent where all are 1.
    pub temperature: Option<Tensor>,
    /// 1 where an own token is call syntax, `[N]`.
    pub format: Tensor,
    /// How many own tokens are call syntax.
    pub n_format: usize,
    /// For each sequence, where its own tokens start in the flat order; one more entry holds `N`.
    pub offsets: Vec<usize>,
    /// Ids without padding.
    pub n_tokens: usize,
}

impl Batch {
    /// Builds the tensors. `coefficient` has one entry a sequence. There must be a sequence, and an own token.
    pub fn new(sequences: &[&Sequence], coefficient: &[f32], device: Device) -> Self {
        let width = sequences.iter().map(|s| s.ids.len()).max().unwrap_or(0);
        let own: usize = sequences.iter().map(|s| s.own_len()).sum();
        let mut ids = vec![0i64; sequences.len() * width];
        let (mut select, mut targets) = (Vec::with_capacity(own), Vec::with_capacity(own));
        let (mut coefficients, mut advantage) = (Vec::with_capacity(own), Vec::with_capacity(own));
        let (mut behaviour, mut reference) = (Vec::with_capacity(own), Vec::with_capacity(own));
        let (mut format, mut temperature) = (Vec::with_capacity(own), Vec::with_capacity(own));
        let mut offsets = vec![0];
        for (row, (sequence, &c)) in sequences.iter().zip(coefficient).enumerate() {
            let start = row * width;
            for (slot, &id) in ids[start..].iter_mut().zip(&sequence.ids) {
                *slot = i64::from(id);
            }
            for position in sequence.own_positions() {
                let position = position as usize;
                select.push((start + position - 1) as i64);
                targets.push(i64::from(sequence.ids[position]));
            }
            let len = sequence.own_len();
            coefficients.resize(select.len(), c);
            advantage.resize(select.len(), sequence.advantage);
            behaviour.extend_from_slice(&sequence.behaviour);
            reference.extend_from_slice(&sequence.reference);
            if sequence.format.len() == len {
                format.extend(sequence.format.iter().map(|&f| f32::from(u8::from(f))));
            }
            format.resize(select.len(), 0.0);
            for turn in &sequence.turns {
                temperature.resize(temperature.len() + turn.len(), turn.temperature);
            }
            offsets.push(select.len());
        }
        let n = select.len();
        let tensor = |values: &[f32]| Tensor::from_slice(values).to_device(device);
        #[expect(
            clippy::float_cmp,
            reason = "a temperature of exactly 1 needs no division"
        )]
        let tempered = temperature.iter().any(|&t: &f32| t != 1.0);
        Self {
            ids: Tensor::from_slice(&ids)
                .view([sequences.len() as i64, width as i64])
                .to_device(device),
            select: Tensor::from_slice(&select).to_device(device),
            targets: Tensor::from_slice(&targets).to_device(device),
            coefficient: tensor(&coefficients),
            advantage: tensor(&advantage),
            behaviour: (behaviour.len() == n).then(|| tensor(&behaviour)),
            reference: (reference.len() == n).then(|| tensor(&reference)),
            temperature: tempered.then(|| tensor(&temperature).unsqueeze(-1)),
            n_format: format.iter().filter(|&&f| f > 0.0).count(),
            format: tensor(&format),
            offsets,
            n_tokens: sequences.iter().map(|s| s.ids.len()).sum(),
        }
    }

    /// Number of own tokens.
    pub fn n_own(&self) -> usize {
        self.offsets.last().copied().unwrap_or(0)
    }

    /// The pairs whose two attempts both lie in the batch, as lists of own tokens from the divergence step on.
    ///
    /// `members` are the sequences of the batch by their index in the data set; `pairs` are (chosen, rejected, divergence step,
    /// task number) by the same indices. Pairs with an arm that has no own token from that step on are left out.
    pub fn pair_index(
        &self,
        members: &[usize],
        sequences: &[&Sequence],
        pairs: &[(usize, usize, i32, u32)],
    ) -> PairIndex {
        let row: BTreeMap<usize, usize> =
            members.iter().enumerate().map(|(r, &m)| (m, r)).collect();
        let tail = |row: usize, from: i32| -> Vec<i64> {
            let mut flat = self.offsets[row] as i64;
            let mut tokens = Vec::new();
            for turn in &sequences[row].turns {
                let len = turn.len() as i64;
                if turn.step >= from {
                    tokens.extend(flat..flat + len);
                }
                flat += len;
            }
            tokens
        };
        let mut index = PairIndex::default();
        for &(chosen, rejected, divergence, task) in pairs {
            let (Some(&c), Some(&r)) = (row.get(&chosen), row.get(&rejected)) else {
                continue;
            };
            let (won, lost) = (tail(c, divergence), tail(r, divergence));
            if won.is_empty() || lost.is_empty() {
                continue;
            }
            let arm = 2 * index.task.len() as i64;
            index.arm.resize(index.arm.len() + won.len(), arm);
            index.arm.resize(index.arm.len() + lost.len(), arm + 1);
            index.tokens.extend(won);
            index.tokens.extend(lost);
            index.task.push(task);
            index.chosen.push(chosen as u32);
        }
        index
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sequence::tests::sequence;

    fn shapes(n: usize) -> Vec<Shape> {
        (0..n)
            .map(|i| Shape {
                len: 20 + (i * 37) % 180,
                unit: i / 4,
                version: u32::from(i >= n / 2),
            })
            .collect()
    }

    const PACKING: Packing = Packing {
        batch_tokens: 2000,
        micro_tokens: 1000,
        allow_mixed: false,
    };

    #[test]
    fn every_sequence_occurs_once_within_budget_and_version() {
        let shapes = shapes(400);
        let steps = plan(&shapes, PACKING, 7, 0);
        let mut seen: Vec<usize> = steps.iter().flatten().flatten().copied().collect();
        seen.sort_unstable();
        assert_eq!(seen, (0..400).collect::<Vec<_>>());
        for step in &steps {
            let members: Vec<usize> = step.iter().flatten().copied().collect();
            assert!(
                members
                    .iter()
                    .all(|&m| shapes[m].version == shapes[members[0]].version)
            );
            let padded: usize = step
                .iter()
                .map(|pass| pass.len() * pass.iter().map(|&i| shapes[i].len).max().unwrap())
                .sum();
            assert!(padded <= PACKING.batch_tokens);
        }
        // Units of four stay together.
        for step in &steps {
            let mut units: BTreeMap<usize, usize> = BTreeMap::new();
            for &member in step.iter().flatten() {
                *units.entry(shapes[member].unit).or_default() += 1;
            }
            assert!(units.values().all(|&n| n == 4));
        }
    }

    #[test]
    fn the_order_depends_on_seed_and_epoch_alone() {
        let shapes = shapes(200);
        assert_eq!(plan(&shapes, PACKING, 1, 0), plan(&shapes, PACKING, 1, 0));
        assert_ne!(plan(&shapes, PACKING, 1, 0), plan(&shapes, PACKING, 1, 1));
        assert_ne!(plan(&shapes, PACKING, 1, 0), plan(&shapes, PACKING, 2, 0));
    }

    #[test]
    fn little_is_padding() {
        let shapes: Vec<Shape> = shapes(4000)
            .into_iter()
            .enumerate()
            .map(|(i, s)| Shape {
                unit: i,
                version: 0,
                ..s
            })
            .collect();
        let packing = Packing {
            batch_tokens: 8192,
            micro_tokens: 8192,
            allow_mixed: false,
        };
        let steps = plan(&shapes, packing, 3, 0);
        let real: usize = shapes.iter().map(|s| s.len).sum();
        let padded: usize = steps
            .iter()
            .flatten()
            .map(|pass| pass.len() * pass.iter().map(|&i| shapes[i].len).max().unwrap())
            .sum();
        assert!((padded as f64) < 1.08 * real as f64, "{padded} for {real}");
        assert!((real as f64) > 0.85 * 8192.0 * steps.len() as f64);
    }

    #[test]
    fn an_oversized_unit_is_a_step_of_its_own() {
        let shapes = vec![
            Shape {
                len: 900,
                unit: 0,
                version: 0
            };
            4
        ];
        let steps = plan(&shapes, PACKING, 0, 0);
        assert_eq!(steps.len(), 1);
        assert_eq!(steps[0].len(), 4, "one sequence a pass");
    }

    #[test]
    fn own_tokens_are_predicted_from_the_position_before() {
        let (a, b) = (sequence("a", 5, 2), sequence("b", 3, 1));
        let batch = Batch::new(&[&a, &b], &[0.5, 0.25], Device::Cpu);
        assert_eq!(batch.ids.size(), [2, 5]);
        assert_eq!(
            Vec::<i64>::try_from(&batch.select).unwrap(),
            vec![2, 3, 5 + 1]
        );
        assert_eq!(Vec::<i64>::try_from(&batch.targets).unwrap(), vec![4, 5, 3]);
        assert_eq!(
            Vec::<f32>::try_from(&batch.coefficient).unwrap(),
            vec![0.5, 0.5, 0.25]
        );
        assert_eq!(batch.offsets, vec![0, 2, 3]);
        assert!(batch.behaviour.is_none() && batch.temperature.is_none());
        assert_eq!(batch.n_tokens, 8);
    }

    #[test]
    fn pairs_start_at_the_step_of_divergence() {
        use crate::sequence::Turn;
        let mut a = sequence("a", 8, 2);
        a.turns.insert(
            0,
            Turn {
                start: 2,
                end: 4,
                step: 0,
                temperature: 1.0,
            },
        );
        a.turns[1].step = 1;
        let b = sequence("b", 4, 1);
        let batch = Batch::new(&[&a, &b], &[1.0, 1.0], Device::Cpu);
        let index = batch.pair_index(
            &[10, 11],
            &[&a, &b],
            &[(10, 11, 0, 5), (10, 11, 1, 5), (10, 99, 0, 6)],
        );
        // From step 1 on the second attempt has no own token, and attempt 99 is not here.
        assert_eq!(index.tokens, vec![0, 1, 2, 3, 4]);
        assert_eq!(index.arm, vec![0, 0, 0, 0, 1]);
        assert_eq!((index.task, index.chosen), (vec![5], vec![10]));
    }
}
