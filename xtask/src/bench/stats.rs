//! Numbers out of noisy samples.

/// The value in the middle, NaN for none.
pub(super) fn median(samples: &[f64]) -> f64 {
    percentile(samples, 50)
}

/// The smallest sample that is not below `percent` of all, NaN for none.
pub(super) fn percentile(samples: &[f64], percent: usize) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let rank = (sorted.len() * percent).div_ceil(100).max(1);
    sorted.get(rank - 1).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_those_of_the_sorted_samples() {
        assert_eq!(median(&[3.0, 1.0, 2.0]), 2.0);
        let hundred: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(
            (median(&hundred), percentile(&hundred, 99), percentile(&hundred, 100)),
            (50.0, 99.0, 100.0)
        );
        assert_eq!(percentile(&[7.0], 1), 7.0);
        assert!(median(&[]).is_nan());
    }
}
