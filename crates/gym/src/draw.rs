//! Draws from a seed that give the same values on every machine and with every version of the random-number crates: only the
//! ChaCha8 stream is theirs, the mapping to ranges is ours.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// A stream of draws.
#[derive(Debug, Clone)]
pub(crate) struct Draw(ChaCha8Rng);

impl Draw {
    /// The stream named by `parts`; other parts give an unrelated stream.
    pub(crate) fn new(parts: &[&str]) -> Self {
        Self(ChaCha8Rng::from_seed(digest(parts)))
    }

    /// A number from 0 to `n - 1`; 0 when `n` is 0.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.0.next_u64()) * n as u128) >> 64) as usize
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: i64, high: i64) -> i64 {
        low + self.below((high - low + 1).max(0) as usize) as i64
    }

    /// True with probability `p`.
    pub(crate) fn chance(&mut self, p: f64) -> bool {
        // 53 bits: every value of the quotient is exact.
        ((self.0.next_u64() >> 11) as f64 / (1_u64 << 53) as f64) < p
    }

    /// One of `items`, which must not be empty.
    pub(crate) fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len())]
    }

    /// Puts `items` into a random order.
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }

    /// `count` different numbers from `low` to `high`, in random order; the range must hold that many.
    pub(crate) fn distinct(&mut self, count: usize, low: i64, high: i64) -> Vec<i64> {
        let mut pool: Vec<i64> = (low..=high).collect();
        for taken in 0..count.min(pool.len()) {
            let other = taken + self.below(pool.len() - taken);
            pool.swap(taken, other);
        }
        pool.truncate(count);
        pool
    }
}

/// The BLAKE3 hash over `parts`, each preceded by its length.
pub(crate) fn digest(parts: &[&str]) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    *hasher.finalize().as_bytes()
}

/// The first eight bytes of [`digest`] as a number.
pub(crate) fn digest_u64(parts: &[&str]) -> u64 {
    let hash = digest(parts);
    let mut first = [0; 8];
    first.copy_from_slice(&hash[..8]);
    u64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_stay_in_range_and_repeat() {
        let (mut a, mut b) = (Draw::new(&["x"]), Draw::new(&["x"]));
        for n in 1..200 {
            let drawn = a.below(n);
            assert!(drawn < n);
            assert_eq!(drawn, b.below(n));
        }
        let mut other = Draw::new(&["y"]);
        assert_ne!(
            (0..8).map(|_| a.below(1000)).collect::<Vec<_>>(),
            (0..8).map(|_| other.below(1000)).collect::<Vec<_>>()
        );
    }

    #[test]
    fn distinct_numbers_are_distinct() {
        let mut drawn = Draw::new(&["d"]).distinct(9, 1, 9);
        drawn.sort_unstable();
        assert_eq!(drawn, (1..=9).collect::<Vec<_>>());
    }

    #[test]
    fn chance_follows_its_probability() {
        let mut draw = Draw::new(&["p"]);
        let hits = (0..10_000).filter(|_| draw.chance(0.3)).count();
        assert!((2_800..3_200).contains(&hits), "{hits}");
    }
}
