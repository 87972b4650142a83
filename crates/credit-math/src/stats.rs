//! The statistics evaluation and gates rest on.

/// The two-sided 95 % quantile of the standard normal distribution.
pub const Z95: f64 = 1.959_963_984_540_054;

/// A value with its 95 % interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The point estimate.
    pub value: f64,
    /// Lower bound.
    pub lo: f64,
    /// Upper bound.
    pub hi: f64,
    /// Observations behind it.
    pub n: usize,
}

/// Arithmetic mean; `None` of nothing.
pub fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Standard deviation with ddof 1; `None` below two values.
pub fn deviation(values: &[f64]) -> Option<f64> {
    if values.len() < 2 {
        return None;
    }
    let mean = mean(values)?;
    let squares: f64 = values.iter().map(|v| (v - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64).sqrt())
}

/// The unbiased estimate of pass@k from `n` samples of which `correct` succeeded: `1 - C(n - correct, k) / C(n, k)`, as a
/// product, so that nothing overflows. `None` if k is 0 or exceeds n, or more succeeded than there are.
pub fn pass_at_k(n: usize, correct: usize, k: usize) -> Option<f64> {
    if k == 0 || k > n || correct > n {
        return None;
    }
    if n - correct < k {
        return Some(1.0);
    }
    let all_fail: f64 = (n - correct + 1..=n)
        .map(|i| 1.0 - k as f64 / i as f64)
        .product();
    Some(1.0 - all_fail)
}

/// Wilson's 95 % score interval of a proportion. `None` of no observations, or if more succeeded than there are.
pub fn wilson_interval(successes: usize, n: usize) -> Option<Estimate> {
    if n == 0 || successes > n {
        return None;
    }
    let (total, z2) = (n as f64, Z95 * Z95);
    let p = successes as f64 / total;
    let centre = (p + z2 / (2.0 * total)) / (1.0 + z2 / total);
    let half =
        Z95 / (1.0 + z2 / total) * (p * (1.0 - p) / total + z2 / (4.0 * total * total)).sqrt();
    Some(Estimate {
        value: p,
        lo: (centre - half).clamp(0.0, p),
        hi: (centre + half).clamp(p, 1.0),
        n,
    })
}

/// The mean of `candidate - base` over the same tasks, with a 95 % interval from the spread of the differences (Student's t).
/// Each pair is one task: average a task's several attempts first, since attempts at one task are not independent. `None` if
/// the slices differ in length or are shorter than 2.
pub fn paired_difference(base: &[f64], candidate: &[f64]) -> Option<Estimate> {
    let differences = differences(base, candidate)?;
    let n = differences.len();
    let value = mean(&differences)?;
    let half = student_t95(n - 1) * deviation(&differences)? / (n as f64).sqrt();
    Some(Estimate {
        value,
        lo: value - half,
        hi: value + half,
        n,
    })
}

/// The same by resampling tasks `rounds` times: the 2.5 % and 97.5 % quantiles of the resampled means. Makes no assumption about
/// the differences' distribution; the same seed gives the same interval. `None` where [`paired_difference`] is, or for 0 rounds.
pub fn paired_bootstrap(
    base: &[f64],
    candidate: &[f64],
    rounds: usize,
    seed: u64,
) -> Option<Estimate> {
    let differences = differences(base, candidate)?;
    if rounds == 0 {
        return None;
    }
    let n = differences.len();
    let mut draw = SplitMix64(seed);
    let mut means: Vec<f64> = (0..rounds)
        .map(|_| (0..n).map(|_| differences[draw.below(n)]).sum::<f64>() / n as f64)
        .collect();
    means.sort_by(f64::total_cmp);
    Some(Estimate {
        value: mean(&differences)?,
        lo: quantile(&means, 0.025),
        hi: quantile(&means, 0.975),
        n,
    })
}

fn differences(base: &[f64], candidate: &[f64]) -> Option<Vec<f64>> {
    (base.len() == candidate.len() && base.len() >= 2)
        .then(|| candidate.iter().zip(base).map(|(c, b)| c - b).collect())
}

/// The quantile of sorted values, interpolated linearly.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let place = q * (sorted.len() - 1) as f64;
    let (low, high) = (place.floor() as usize, place.ceil() as usize);
    sorted[low] + (sorted[high] - sorted[low]) * (place - place.floor())
}

/// The two-sided 95 % quantile of Student's t: exact to four digits up to 30 degrees of freedom from the usual table, above by
/// the Cornish–Fisher expansion around the normal quantile (error below 1e-4).
fn student_t95(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010,
        2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739,
        2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
    ];
    match degrees {
        0 => f64::INFINITY,
        1..=30 => TABLE[degrees - 1],
        _ => {
            let (v, z) = (degrees as f64, Z95);
            z + (z.powi(3) + z) / (4.0 * v)
                + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * v * v)
        }
    }
}

/// How many equally weighted samples these importance weights are worth: `(Σw)² / Σw²`. 0 of nothing, or of weights that are
/// all 0.
pub fn effective_sample_size(weights: &[f64]) -> f64 {
    // Scaled by the largest weight, so that the squares neither overflow nor vanish.
    let largest = weights.iter().copied().fold(0.0, f64::max);
    if largest <= 0.0 {
        return 0.0;
    }
    let (mut sum, mut squares) = (0.0, 0.0);
    for weight in weights {
        sum += weight / largest;
        squares += (weight / largest).powi(2);
    }
    sum * sum / squares
}

/// Steele, Lea and Flood's generator: small, and the same everywhere.
struct SplitMix64(u64);

impl SplitMix64 {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, n: usize) -> usize {
        ((u128::from(self.next()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
#[track_caller]
pub(crate) fn assert_close(got: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(got.len(), expected.len(), "{got:?} against {expected:?}");
    for (g, e) in got.iter().zip(expected) {
        assert!((g - e).abs() <= tolerance, "{got:?} against {expected:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn pass_at_k_counts_the_ways_to_fail() {
        assert_eq!(pass_at_k(8, 0, 8), Some(0.0));
        assert_eq!(pass_at_k(8, 1, 8), Some(1.0));
        assert_close(&[pass_at_k(8, 2, 1).unwrap()], &[0.25], 1e-12);
        // 1 - C(6,2)/C(8,2) = 1 - 15/28
        assert_close(&[pass_at_k(8, 2, 2).unwrap()], &[1.0 - 15.0 / 28.0], 1e-12);
        assert_eq!(
            (pass_at_k(4, 1, 5), pass_at_k(4, 1, 0), pass_at_k(4, 5, 1)),
            (None, None, None)
        );
    }

    #[test]
    fn wilson_has_textbook_values() {
        let half = wilson_interval(50, 100).unwrap();
        assert_close(&[half.lo, half.hi], &[0.4038, 0.5962], 1e-4);
        let none = wilson_interval(0, 10).unwrap();
        assert_close(&[none.lo, none.hi], &[0.0, 0.2775], 1e-4);
        assert_eq!((wilson_interval(0, 0), wilson_interval(2, 1)), (None, None));
    }

    #[test]
    fn the_paired_interval_is_that_of_the_t_test() {
        // Differences 1, 2, 3, 4, 5: mean 3, deviation sqrt(2.5), t with 4 degrees 2.7764.
        let estimate = paired_difference(&[0.0; 5], &[1.0, 2.0, 3.0, 4.0, 5.0]).unwrap();
        let half = 2.7764 * 2.5f64.sqrt() / 5f64.sqrt();
        assert_close(
            &[estimate.value, estimate.lo, estimate.hi],
            &[3.0, 3.0 - half, 3.0 + half],
            1e-9,
        );
        assert_eq!(paired_difference(&[1.0], &[1.0]), None);
        assert_eq!(paired_difference(&[1.0, 2.0], &[1.0]), None);
    }

    #[test]
    fn student_quantiles_join_smoothly_and_end_at_the_normal_one() {
        assert_close(
            &[student_t95(31), student_t95(100), student_t95(399)],
            &[2.0395, 1.9840, 1.9659],
            1e-4,
        );
        assert!((student_t95(1_000_000) - Z95).abs() < 1e-5);
    }

    #[test]
    fn pairing_sees_what_independent_intervals_hide() {
        let base: Vec<f64> = (0..400).map(|i| f64::from(i % 2)).collect();
        let candidate: Vec<f64> = base
            .iter()
            .enumerate()
            .map(|(i, b)| if i % 20 == 0 { 1.0 } else { *b })
            .collect();
        let paired = paired_difference(&base, &candidate).unwrap();
        assert!(paired.lo > 0.0, "{paired:?}");
        let bootstrap = paired_bootstrap(&base, &candidate, 2000, 7).unwrap();
        assert_close(&[bootstrap.lo, bootstrap.hi], &[paired.lo, paired.hi], 0.01);
        assert_eq!(
            bootstrap,
            paired_bootstrap(&base, &candidate, 2000, 7).unwrap()
        );
    }

    #[test]
    fn equal_weights_are_worth_their_number_and_one_heavy_weight_one() {
        assert_close(&[effective_sample_size(&[0.3; 7])], &[7.0], 1e-9);
        assert_close(&[effective_sample_size(&[1e200, 1.0, 1.0])], &[1.0], 1e-9);
        assert_close(
            &[effective_sample_size(&[]), effective_sample_size(&[0.0; 3])],
            &[0.0, 0.0],
            0.0,
        );
    }

    proptest! {
        #[test]
        fn pass_at_k_equals_the_count_over_all_subsets(n in 1usize..9, c in 0usize..9, k in 1usize..9) {
            prop_assume!(c <= n && k <= n);
            let (mut pass, mut all) = (0u32, 0u32);
            for subset in 0u32..(1 << n) {
                if subset.count_ones() as usize == k {
                    all += 1;
                    pass += u32::from(subset & ((1 << c) - 1) != 0);
                }
            }
            let estimate = pass_at_k(n, c, k).unwrap();
            prop_assert!((estimate - f64::from(pass) / f64::from(all)).abs() < 1e-9);
        }

        #[test]
        fn intervals_hold_their_value(successes in 0usize..200, extra in 0usize..200) {
            prop_assume!(successes + extra > 0);
            let e = wilson_interval(successes, successes + extra).unwrap();
            prop_assert!(0.0 <= e.lo && e.lo <= e.value && e.value <= e.hi && e.hi <= 1.0);
        }

        #[test]
        fn the_effective_size_lies_between_one_and_the_number(weights in prop::collection::vec(0.001..100.0f64, 1..50)) {
            let size = effective_sample_size(&weights);
            prop_assert!(size >= 1.0 - 1e-9 && size <= weights.len() as f64 + 1e-9);
        }

        #[test]
        fn swapping_the_arms_mirrors_the_interval(rows in prop::collection::vec((0.0..1.0f64, 0.0..1.0f64), 2..40)) {
            let (a, b): (Vec<f64>, Vec<f64>) = rows.into_iter().unzip();
            let (there, back) = (paired_difference(&a, &b).unwrap(), paired_difference(&b, &a).unwrap());
            assert_close(&[there.value, there.lo, there.hi], &[-back.value, -back.hi, -back.lo], 1e-9);
        }
    }
}
