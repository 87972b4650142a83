//! Controlled faults as a pipeline sets them.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Faults injected on purpose, so that agents drill on them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FaultsConfig {
    /// Calls that take one to two seconds longer.
    pub slow: FaultRate,
    /// Calls refused for want of permission.
    pub permission_denied: FaultRate,
    /// Calls whose connection breaks before anything is done.
    pub network_failure: FaultRate,
    /// Calls just before which somebody else changes a file of the work directory.
    pub concurrent_change: FaultRate,
    /// Calls of whose output only the beginning arrives.
    pub truncated_output: FaultRate,
    /// Calls during which the disk is full.
    pub disk_full: FaultRate,
    /// Whether evaluations get them, too.
    pub in_evaluation: bool,
}

impl FaultsConfig {
    /// Each kind's label and setting.
    pub fn kinds(&self) -> [(&'static str, &FaultRate); 6] {
        [
            ("slow", &self.slow),
            ("permission_denied", &self.permission_denied),
            ("network_failure", &self.network_failure),
            ("concurrent_change", &self.concurrent_change),
            ("truncated_output", &self.truncated_output),
            ("disk_full", &self.disk_full),
        ]
    }

    /// Whether any call can meet one.
    pub fn are_on(&self) -> bool {
        self.kinds().iter().any(|(_, rate)| rate.rate > 0.0)
    }
}

/// How often: a number, or `{ rate = 0.01, tools = ["write_file"] }`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct FaultRate {
    /// The share of calls.
    pub rate: f64,
    /// Only calls of these tools; empty means every tool that the kind makes sense for.
    pub tools: Vec<String>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Whole {
    rate: f64,
    #[serde(default)]
    tools: Vec<String>,
}

impl Serialize for FaultRate {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.tools.is_empty() {
            return serializer.serialize_f64(self.rate);
        }
        Whole {
            rate: self.rate,
            tools: self.tools.clone(),
        }
        .serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for FaultRate {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Either;

        impl<'de> Visitor<'de> for Either {
            type Value = FaultRate;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(
                    "a share of calls such as 0.02, or { rate = 0.02, tools = [\"write_file\"] }",
                )
            }

            fn visit_f64<E>(self, rate: f64) -> Result<FaultRate, E> {
                Ok(FaultRate {
                    rate,
                    tools: Vec::new(),
                })
            }

            fn visit_i64<E: serde::de::Error>(self, rate: i64) -> Result<FaultRate, E> {
                self.visit_f64(rate as f64)
            }

            fn visit_u64<E: serde::de::Error>(self, rate: u64) -> Result<FaultRate, E> {
                self.visit_f64(rate as f64)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<FaultRate, A::Error> {
                let Whole { rate, tools } = Whole::deserialize(MapAccessDeserializer::new(map))?;
                Ok(FaultRate { rate, tools })
            }
        }

        deserializer.deserialize_any(Either)
    }
}

#[cfg(test)]
mod tests {
    use crate::Pipeline;
    use crate::exit::USAGE;

    #[test]
    fn a_rate_is_a_number_or_a_number_and_tools() {
        let text = "name = 'p'\n[faults]\nslow = 0.02\ndisk_full = { rate = 1, tools = [\"write_file\"] }\n";
        let pipeline =
            Pipeline::parse(text, "p.toml", &["faults.network_failure=0.5".to_owned()]).unwrap();
        let faults = &pipeline.faults;
        assert!(faults.are_on() && !faults.in_evaluation);
        let rates: Vec<(&str, f64, usize)> = faults
            .kinds()
            .iter()
            .map(|(kind, rate)| (*kind, rate.rate, rate.tools.len()))
            .filter(|(_, rate, _)| *rate > 0.0)
            .collect();
        assert_eq!(
            rates,
            [
                ("slow", 0.02, 0),
                ("network_failure", 0.5, 0),
                ("disk_full", 1.0, 1)
            ]
        );
        // What a run record keeps and what --dry-run prints come back the same.
        let json = serde_json::from_value::<Pipeline>(pipeline.to_json()).unwrap();
        assert_eq!(json.faults, pipeline.faults);
        let toml = toml::to_string_pretty(&pipeline).unwrap();
        assert_eq!(Pipeline::parse(&toml, "p.toml", &[]).unwrap(), pipeline);
        assert!(
            !Pipeline::parse("name = 'p'", "p.toml", &[])
                .unwrap()
                .faults
                .are_on()
        );
    }

    #[test]
    fn mistakes_name_their_key() {
        for (set, words) in [
            ("slow = 1.5", ["faults.slow", "between 0 and 1"]),
            ("slow = nan", ["faults.slow", "between 0 and 1"]),
            ("slow = \"often\"", ["faults.slow", "a share of calls"]),
            ("disk_full = { rat = 1 }", ["faults.disk_full", "rat"]),
            ("slow = { rate = -1 }", ["faults.slow", "between 0 and 1"]),
            ("slwo = 0.1", ["faults", "slwo"]),
        ] {
            let text = format!("name = 'p'\n[faults]\n{set}\n");
            let failure = Pipeline::parse(&text, "p.toml", &[]).unwrap_err();
            assert_eq!(failure.code, USAGE);
            for word in words {
                assert!(failure.message.contains(word), "{set}: {}", failure.message);
            }
        }
    }
}
