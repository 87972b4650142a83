//! The closed vocabularies of the lake. Each label is stored as its snake-case text, so that SQL reads naturally.

use serde::{Deserialize, Serialize};

macro_rules! labels {
    ($(#[$meta:meta])* $name:ident { $($(#[$vmeta:meta])* $variant:ident => $text:literal,)* }) => {
        $(#[$meta])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
        pub enum $name {
            $($(#[$vmeta])* #[serde(rename = $text)] $variant,)*
        }

        impl $name {
            /// Every label, in the order of the documentation.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The text stored in the lake.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(self.as_str())
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, Self::Err> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    other => Err(format!(
                        "unknown {} '{other}'; one of: {}",
                        stringify!($name),
                        [$($text),*].join(", "),
                    )),
                }
            }
        }
    };
}

labels!(
    /// What episodes were collected for. Credit reads only `train` and `import`, so evaluation never leaks into training.
    Purpose {
        /// Episodes to learn from.
        Train => "train",
        /// Episodes that steer training (curves, champion choice).
        Validation => "validation",
        /// Episodes on tasks never trained on, run once at the end.
        HeldOut => "held_out",
        /// Episodes of a deployed policy.
        Live => "live",
        /// Episodes recorded by another harness.
        Import => "import",
    }
);

labels!(
    /// Which part of a task set a task belongs to; parts share no instance.
    Split {
        /// Tasks to learn on.
        Train => "train",
        /// Tasks that steer training.
        Validation => "validation",
        /// Tasks never trained on.
        HeldOut => "held_out",
    }
);

labels!(
    /// Why an episode ended. The last five are infrastructure: such episodes are never scored.
    EndReason {
        /// The agent called `submit`.
        Submitted => "submitted",
        /// The agent stopped calling tools without submitting.
        GaveUp => "gave_up",
        /// The step limit was reached.
        StepLimit => "step_limit",
        /// The episode clock ran out.
        EpisodeTimeout => "episode_timeout",
        /// The context window was full.
        ContextLimit => "context_limit",
        /// Too many replies in a row could not be parsed.
        ParseLimit => "parse_limit",
        /// The recording harness gave another reason (imported episodes; see `extras`).
        Other => "other",
        /// The sandbox failed.
        SandboxFault => "sandbox_fault",
        /// The model endpoint failed.
        EndpointFault => "endpoint_fault",
        /// The host failed (disk full, out of memory).
        HostFault => "host_fault",
        /// The verifier itself failed.
        VerifierFault => "verifier_fault",
        /// The run was interrupted and the episode could not be resumed.
        Interrupted => "interrupted",
    }
);

impl EndReason {
    /// True where infrastructure, not the agent, ended the episode.
    pub const fn is_infrastructure(self) -> bool {
        matches!(
            self,
            Self::SandboxFault
                | Self::EndpointFault
                | Self::HostFault
                | Self::VerifierFault
                | Self::Interrupted
        )
    }
}

labels!(
    /// How one tool call ended.
    CallOutcome {
        /// The tool ran and succeeded (exit code 0).
        Ok => "ok",
        /// The tool ran and failed (exit code other than 0, file not found, SQL error, …).
        Error => "error",
        /// The call's clock ran out; the process tree was killed.
        Timeout => "timeout",
        /// The memory limit was hit.
        Memory => "memory",
        /// The process limit was hit.
        Processes => "processes",
        /// The disk limit was hit.
        Disk => "disk",
        /// The output limit was hit; the process tree was killed.
        OutputLimit => "output_limit",
        /// Killed by a signal for another reason.
        Killed => "killed",
        /// The arguments did not fit the tool's schema, or no such tool exists; nothing ran.
        Rejected => "rejected",
        /// The call was started and its result is not known (the program died meanwhile).
        OutcomeUnknown => "outcome_unknown",
        /// The sandbox failed; not the agent's doing.
        SandboxFault => "sandbox_fault",
    }
);

labels!(
    /// What parsing made of a model turn.
    ParseStatus {
        /// Parsed as it stood.
        Ok => "ok",
        /// Parsed after a repair that is recorded.
        Repaired => "repaired",
        /// Could not be parsed; the error went back to the model.
        Error => "error",
        /// The turn has no call and needs none.
        None => "none",
    }
);

labels!(
    /// Who decided whether an episode succeeded.
    VerdictKind {
        /// As recorded by the harness the episode came from.
        Recorded => "recorded",
        /// By the task's verifier at the end of the episode.
        Verified => "verified",
        /// By the task's verifier, run again later.
        ReVerified => "re_verified",
        /// By a judge (rules or a model); kept apart from verified results.
        Judge => "judge",
    }
);

labels!(
    /// The pool an episode belongs to.
    Tier {
        /// Succeeded, no serious flaw.
        Positive => "positive",
        /// In between: partial success, or success with serious flaws.
        Graded => "graded",
        /// Failed; kept for contrast, never thrown away.
        Negative => "negative",
    }
);

labels!(
    /// The one failure label of an episode.
    FailReason {
        /// No usable call came out of the model's text.
        Format => "format",
        /// The command or query itself did not parse.
        SyntaxError => "syntax_error",
        /// A tool failed and the agent did not recover.
        ToolError => "tool_error",
        /// A call or the episode ran out of time.
        Timeout => "timeout",
        /// Memory, disk, process or output limit.
        Resource => "resource",
        /// The same thing again and again.
        Loop => "loop",
        /// Wrote without having looked at what it depends on.
        RetrievalOmission => "retrieval_omission",
        /// Steps that contradict each other or the task.
        LogicBreak => "logic_break",
        /// Ran cleanly, and the result is wrong.
        WrongResult => "wrong_result",
        /// Claimed success that the verifier denies, without a check of its own.
        FalseClaim => "false_claim",
        /// Stopped without submitting.
        GaveUp => "gave_up",
        /// Ran into the step limit.
        StepLimit => "step_limit",
        /// Infrastructure: not the agent's failure.
        Environment => "environment",
    }
);
