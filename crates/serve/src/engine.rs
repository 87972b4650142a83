//! The engine: one thread that owns the model and answers everyone.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use drillyard_model::{DecodeRow, Decoder, Llama, ModelError, PrefillRow};
use rand::{Rng, RngExt};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use tch::Tensor;
use tokio::sync::{mpsc, oneshot};

use crate::ServeError;
use crate::metrics::Metrics;
use crate::sample::{Draw, sample};
use crate::slots::{Place, Placement, Slots};

/// How the engine runs.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Conversations generated for at once; as many are remembered between turns.
    pub max_batch: usize,
    /// Longest conversation in tokens; the model's own limit where it is smaller.
    pub max_len: usize,
    /// Requests that may wait; more are refused.
    pub queue: usize,
    /// Threads for each operation; 0 leaves libtorch's choice. One is best for small models beside other work.
    pub threads: usize,
    /// Seeds requests that bring no seed of their own.
    pub seed: u64,
}

impl Default for EngineOptions {
    fn default() -> Self {
        Self {
            max_batch: 64,
            max_len: 4096,
            queue: 1024,
            threads: 1,
            seed: 0,
        }
    }
}

/// What to generate.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateRequest {
    /// The ids of the conversation so far; at least one.
    pub prompt: Vec<i32>,
    /// Tokens to generate at most (fewer where the conversation reaches the longest length); at least one.
    pub max_tokens: usize,
    /// 0 takes the likeliest token.
    pub temperature: f64,
    /// Only the likeliest tokens that together have this much probability are drawn from; 1 for all.
    pub top_p: f64,
    /// Makes a request repeatable where it runs alone.
    pub seed: Option<u64>,
}

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// The model ended its turn.
    Stop,
    /// The most tokens allowed, or the longest conversation possible, were reached.
    Length,
}

/// What was generated.
#[derive(Debug, Clone, PartialEq)]
pub struct Generated {
    /// The ids, the end-of-turn token included where it was sampled.
    pub ids: Vec<i32>,
    /// For each id its log-probability under `softmax(logits / temperature)`.
    pub logprobs: Vec<f32>,
    /// Why it ended.
    pub finish: Finish,
    /// How many of the prompt's tokens were not computed anew.
    pub cached_tokens: usize,
    /// The hash of the weights that answered.
    pub weights_hash: Arc<str>,
}

/// A stop condition beyond the end-of-turn tokens: sees the ids so far, says whether to stop.
pub type StopWhen = Box<dyn FnMut(&[i32]) -> bool + Send>;

struct Job {
    request: GenerateRequest,
    stop_when: Option<StopWhen>,
    done: oneshot::Sender<Result<Generated, ServeError>>,
    /// Every id as it comes, with its log-probability.
    stream: Option<mpsc::UnboundedSender<(i32, f32)>>,
}

enum Command {
    Generate(Box<Job>),
    Swap(Box<Swap>),
}

struct Swap {
    decoder: Decoder,
    weights_hash: Arc<str>,
    done: oneshot::Sender<()>,
}

/// A handle of the engine; clones share it. The thread ends when the last handle is gone and the last request is answered.
#[derive(Debug, Clone)]
pub struct Engine {
    commands: mpsc::Sender<Command>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    metrics: Metrics,
    weights_hash: RwLock<Arc<str>>,
    options: EngineOptions,
    max_len: usize,
}

impl Shared {
    fn weights_hash(&self) -> Arc<str> {
        let hash = self.weights_hash.read();
        Arc::clone(&hash.unwrap_or_else(PoisonError::into_inner))
    }
}

impl Engine {
    /// Copies a model's weights and starts the thread. Generation ends at the model's end-of-turn tokens and at `stop_ids`.
    pub fn start(
        model: &Llama,
        stop_ids: &[i32],
        options: EngineOptions,
    ) -> Result<Self, ServeError> {
        let decoder = decoder(model, &options)?;
        let mut stop: Vec<i32> = model
            .config()
            .eos_token_ids
            .iter()
            .map(|id| *id as i32)
            .collect();
        stop.extend(stop_ids);
        let (commands, inbox) = mpsc::channel(options.queue.max(1));
        let shared = Arc::new(Shared {
            metrics: Metrics::default(),
            weights_hash: RwLock::new(model.weights_hash()?.into()),
            max_len: decoder.max_len(),
            options,
        });
        let worker = Worker {
            slots: Slots::new(decoder.slots()),
            decoder,
            inbox,
            waiting: VecDeque::new(),
            swap: None,
            active: Vec::new(),
            stop,
            steps_since_prefill: 0,
            seeds: ChaCha8Rng::seed_from_u64(shared.options.seed),
            shared: Arc::clone(&shared),
        };
        std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || worker.run())?;
        Ok(Self { commands, shared })
    }

    /// Generates; waits for the end.
    pub async fn generate(&self, request: GenerateRequest) -> Result<Generated, ServeError> {
        self.submit(request, None, None)?
            .await
            .map_err(|_| ServeError::Stopped)?
    }

    /// Generates, sending every id and its log-probability as it comes. Dropping the returned receiver cancels the request.
    pub(crate) fn submit(
        &self,
        request: GenerateRequest,
        stop_when: Option<StopWhen>,
        stream: Option<mpsc::UnboundedSender<(i32, f32)>>,
    ) -> Result<oneshot::Receiver<Result<Generated, ServeError>>, ServeError> {
        if request.prompt.is_empty() {
            return Err(ServeError::param("messages", "the prompt is empty"));
        }
        if request.max_tokens == 0 {
            return Err(ServeError::param("max_tokens", "must be at least 1"));
        }
        if request.prompt.len() >= self.shared.max_len {
            return Err(ServeError::ContextLength {
                prompt: request.prompt.len(),
                max_len: self.shared.max_len,
            });
        }
        let (done, receiver) = oneshot::channel();
        let job = Job {
            request,
            stop_when,
            done,
            stream,
        };
        match self.commands.try_send(Command::Generate(Box::new(job))) {
            Ok(()) => Ok(receiver),
            Err(mpsc::error::TrySendError::Full(_)) => {
                self.shared.metrics.refused();
                Err(ServeError::QueueFull {
                    waiting: self.commands.max_capacity(),
                })
            }
            Err(mpsc::error::TrySendError::Closed(_)) => Err(ServeError::Stopped),
        }
    }

    /// Replaces the weights by another model's: requests under way end with the old ones, later ones wait. Returns once the new
    /// ones answer.
    pub fn swap(
        &self,
        model: &Llama,
    ) -> impl Future<Output = Result<(), ServeError>> + Send + use<> {
        let (done, swapped) = oneshot::channel();
        let hash = model.weights_hash().map_err(ServeError::from);
        let fresh = decoder(model, &self.shared.options);
        let commands = self.commands.clone();
        async move {
            let swap = Swap {
                decoder: fresh?,
                weights_hash: hash?.into(),
                done,
            };
            commands
                .send(Command::Swap(Box::new(swap)))
                .await
                .map_err(|_| ServeError::Stopped)?;
            swapped.await.map_err(|_| ServeError::Stopped)
        }
    }

    /// The hash of the weights that answer now.
    pub fn weights_hash(&self) -> Arc<str> {
        self.shared.weights_hash()
    }

    /// Longest conversation in tokens.
    pub fn max_len(&self) -> usize {
        self.shared.max_len
    }

    /// What the engine has done so far.
    pub fn metrics(&self) -> &Metrics {
        &self.shared.metrics
    }
}

fn decoder(model: &Llama, options: &EngineOptions) -> Result<Decoder, ServeError> {
    let limit = model.config().max_position_embeddings as usize;
    Ok(Decoder::new(
        model,
        options.max_batch.max(1),
        options.max_len.min(limit),
    )?)
}

/// Prompts are computed together: a new one waits for others until this many are there …
const PREFILL_ROWS: usize = 8;
/// … or this many steps have passed.
const PREFILL_STEPS: usize = 3;
/// Tokens of prompts computed at once, filled-up places included.
const PREFILL_TOKENS: usize = 4096;

struct Worker {
    decoder: Decoder,
    slots: Slots,
    inbox: mpsc::Receiver<Command>,
    waiting: VecDeque<Box<Job>>,
    swap: Option<Box<Swap>>,
    /// In ascending order of slot.
    active: Vec<Active>,
    stop: Vec<i32>,
    steps_since_prefill: usize,
    seeds: ChaCha8Rng,
    shared: Arc<Shared>,
}

/// A request under way.
struct Active {
    slot: usize,
    job: Box<Job>,
    ids: Vec<i32>,
    logprobs: Vec<f32>,
    rng: ChaCha8Rng,
    cached_tokens: usize,
    /// Tokens it may have in all.
    limit: usize,
}

impl Active {
    fn draw(&mut self) -> Draw {
        Draw {
            temperature: self.job.request.temperature,
            top_p: self.job.request.top_p,
            uniform: 1.0 - self.rng.random::<f64>(),
        }
    }

    /// Takes a sampled token; says why generation ends, if it does.
    fn push(&mut self, id: i32, logprob: f32, stop: &[i32]) -> Option<Finish> {
        self.ids.push(id);
        self.logprobs.push(logprob);
        if let Some(stream) = &self.job.stream {
            // A reader that went away is noticed below, by its other channel.
            let _ = stream.send((id, logprob));
        }
        let stopped = stop.contains(&id)
            || self
                .job
                .stop_when
                .as_mut()
                .is_some_and(|stop| stop(&self.ids));
        if stopped {
            Some(Finish::Stop)
        } else {
            (self.ids.len() >= self.limit).then_some(Finish::Length)
        }
    }

    fn finish(self, finish: Finish, weights_hash: Arc<str>) {
        let generated = Generated {
            ids: self.ids,
            logprobs: self.logprobs,
            finish,
            cached_tokens: self.cached_tokens,
            weights_hash,
        };
        // A client that went away needs no answer.
        drop(self.job.done.send(Ok(generated)));
    }
}

impl Worker {
    fn run(mut self) {
        if self.shared.options.threads > 0 {
            tch::set_num_threads(self.shared.options.threads as i32);
        }
        let _guard = tch::no_grad_guard();
        loop {
            if self.active.is_empty() && self.waiting.is_empty() && self.swap.is_none() {
                self.shared.metrics.in_flight(0);
                match self.inbox.blocking_recv() {
                    Some(command) => self.receive(command),
                    None => return,
                }
            }
            // What arrives stays in the channel, whose bound is the queue's, until there is a slot.
            while self.swap.is_none()
                && self.waiting.len() + self.active.len() < self.decoder.slots()
            {
                match self.inbox.try_recv() {
                    Ok(command) => self.receive(command),
                    Err(_) => break,
                }
            }
            self.shared
                .metrics
                .in_flight(self.active.len() + self.waiting.len() + self.inbox.len());
            match catch_unwind(AssertUnwindSafe(|| self.step())) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail(&error.to_string()),
                Err(panic) => {
                    let text = panic
                        .downcast_ref::<String>()
                        .map(String::as_str)
                        .or_else(|| panic.downcast_ref::<&str>().copied());
                    self.fail(text.unwrap_or("unknown failure"));
                }
            }
        }
    }

    fn receive(&mut self, command: Command) {
        match command {
            Command::Generate(job) => self.waiting.push_back(job),
            Command::Swap(swap) => self.swap = Some(swap),
        }
    }

    fn step(&mut self) -> Result<(), ModelError> {
        self.drop_cancelled();
        let enough = self.active.is_empty()
            || self.waiting.len() >= PREFILL_ROWS.min(self.active.len())
            || self.steps_since_prefill >= PREFILL_STEPS;
        if !self.waiting.is_empty() && enough {
            self.admit()?;
            self.steps_since_prefill = 0;
        }
        if self.active.is_empty() {
            if self.waiting.is_empty()
                && let Some(swap) = self.swap.take()
            {
                self.decoder = swap.decoder;
                self.slots.clear();
                let hash = self.shared.weights_hash.write();
                *hash.unwrap_or_else(PoisonError::into_inner) = swap.weights_hash;
                let _ = swap.done.send(());
            }
            return Ok(());
        }
        self.steps_since_prefill += 1;
        self.decode()
    }

    /// Answers everyone under way with an error and starts afresh.
    fn fail(&mut self, message: &str) {
        tracing::error!(message, "the model failed on a batch");
        for active in self.active.drain(..) {
            drop(
                active
                    .job
                    .done
                    .send(Err(ServeError::Engine(message.to_owned()))),
            );
        }
        self.slots.clear();
    }

    fn drop_cancelled(&mut self) {
        let before = self.active.len() + self.waiting.len();
        self.waiting.retain(|job| !job.done.is_closed());
        let slots = &mut self.slots;
        self.active.retain(|active| {
            let cancelled = active.job.done.is_closed();
            if cancelled {
                slots.release(active.slot);
            }
            !cancelled
        });
        for _ in self.active.len() + self.waiting.len()..before {
            self.shared.metrics.cancelled();
        }
    }

    /// Finds slots for waiting prompts and computes them.
    fn admit(&mut self) -> Result<(), ModelError> {
        loop {
            let mut wave: Vec<(Place, Active)> = Vec::new();
            let mut later = VecDeque::new();
            while let Some(job) = self.waiting.pop_front() {
                match self.slots.place(&job.request.prompt) {
                    Placement::Now(place) => {
                        self.slots.take(place.slot, &job.request.prompt);
                        if let Some(from) = place.copy_from {
                            self.decoder.copy_prefix(from, place.slot, place.kept)?;
                        }
                        let active = self.begin(job, place);
                        wave.push((place, active));
                    }
                    Placement::AfterPending => later.push_back(job),
                    Placement::Full => {
                        later.push_back(job);
                        break;
                    }
                }
            }
            later.append(&mut self.waiting);
            self.waiting = later;
            if wave.is_empty() {
                return Ok(());
            }
            self.prefill(wave)?;
        }
    }

    fn begin(&mut self, job: Box<Job>, place: Place) -> Active {
        let request = &job.request;
        self.shared.metrics.taken(request.prompt.len(), place.kept);
        let seed = request.seed.unwrap_or_else(|| self.seeds.next_u64());
        Active {
            slot: place.slot,
            ids: Vec::new(),
            logprobs: Vec::new(),
            rng: ChaCha8Rng::seed_from_u64(seed),
            cached_tokens: place.kept,
            limit: request
                .max_tokens
                .min(self.shared.max_len - request.prompt.len()),
            job,
        }
    }

    /// Computes prompts, those of similar length together, and samples each one's first token.
    fn prefill(&mut self, mut wave: Vec<(Place, Active)>) -> Result<(), ModelError> {
        let new = |(place, active): &(Place, Active)| active.job.request.prompt.len() - place.kept;
        wave.sort_by_key(|row| (std::cmp::Reverse(new(row)), row.0.slot));
        let mut wave = VecDeque::from(wave);
        while let Some(first) = wave.front() {
            let longest = new(first);
            let fits = wave
                .iter()
                .enumerate()
                .take_while(|(i, row)| {
                    (new(row) + 16) * 2 >= longest
                        && (i + 1) * longest <= PREFILL_TOKENS.max(longest)
                })
                .count();
            let started = Instant::now();
            let mut batch: Vec<(Place, Active)> = wave.drain(..fits).collect();
            batch.sort_by_key(|(place, _)| place.slot);
            let rows: Vec<PrefillRow<'_>> = batch
                .iter()
                .map(|(place, active)| PrefillRow {
                    slot: place.slot,
                    start: place.kept,
                    ids: &active.job.request.prompt[place.kept..],
                })
                .collect();
            let logits = self.decoder.prefill(&rows)?;
            for (place, _) in &batch {
                self.slots.ready(place.slot);
            }
            let n = batch.len();
            self.sampled(
                &logits,
                batch.into_iter().map(|(_, active)| active).collect(),
            )?;
            self.shared.metrics.prefilled(n, started.elapsed());
        }
        Ok(())
    }

    /// Gives everyone under way one token.
    fn decode(&mut self) -> Result<(), ModelError> {
        let started = Instant::now();
        let active = std::mem::take(&mut self.active);
        let n = active.len();
        let rows: Vec<DecodeRow> = active
            .iter()
            .filter_map(|a| {
                Some(DecodeRow {
                    slot: a.slot,
                    position: self.slots.len(a.slot),
                    id: *a.ids.last()?,
                })
            })
            .collect();
        let logits = self.decoder.decode(&rows);
        let logits = match logits {
            Ok(logits) => logits,
            Err(error) => {
                self.active = active;
                return Err(error);
            }
        };
        for row in &rows {
            self.slots.push(row.slot, row.id);
        }
        self.sampled(&logits, active)?;
        self.shared.metrics.decoded(n, started.elapsed());
        Ok(())
    }

    /// Samples a token for each of `rows`, answers those that are done, and puts the others back among the active ones.
    fn sampled(&mut self, logits: &Tensor, mut rows: Vec<Active>) -> Result<(), ModelError> {
        let draws: Vec<Draw> = rows.iter_mut().map(Active::draw).collect();
        let tokens = sample(logits, &draws);
        let tokens = match tokens {
            Ok(tokens) => tokens,
            Err(error) => {
                self.active.append(&mut rows);
                return Err(error);
            }
        };
        let hash = self.shared.weights_hash();
        for (mut row, (id, logprob)) in rows.into_iter().zip(tokens) {
            match row.push(id, logprob, &self.stop) {
                Some(finish) => {
                    self.slots.release(row.slot);
                    row.finish(finish, Arc::clone(&hash));
                }
                None => self.active.push(row),
            }
        }
        self.active.sort_by_key(|active| active.slot);
        Ok(())
    }
}
