//! Goals of kernels and server steps on a device (`docs/CUDA.md`, "Goals"), and the verdict for each.

use super::{KERNEL, SERVER_STEP};
use crate::report::Outcome;

/// How long a tensor is at which kernels are judged.
const ELEMENTS: u64 = 1_000_000_000;

/// Something to be reached by lines of the report.
#[derive(Clone, Copy)]
struct Goal {
    what: &'static str,
    rule: &'static str,
    gradients: &'static [u32],
    gradient_type: &'static str,
    field: &'static str,
    least: f64,
    about: &'static str,
}

const COPIES: &str = "ratio_to_ceiling";
const BFLOAT16: &str = "bfloat16";
/// Adam on gradients in half precision beside the device's own copies.
const ADAM: Goal = Goal {
    what: KERNEL,
    rule: "adam",
    gradients: &[1, 4, 8],
    gradient_type: BFLOAT16,
    field: COPIES,
    least: 0.9,
    about: "share of the device's copies",
};
const TORCH: Goal = Goal { field: "ratio_to_torch", gradients: &[8], least: 2.0, about: "times torch", ..ADAM };
const COMPILED: Goal =
    Goal { field: "ratio_to_torch_compiled", gradients: &[8], least: 1.0, about: "times torch.compile", ..ADAM };
const GOALS: [Goal; 8] = [
    ADAM,
    Goal { gradients: &[1, 8], gradient_type: "float32", ..ADAM },
    Goal { gradients: &[1], gradient_type: "float32", least: 1.0, ..TORCH },
    TORCH,
    Goal { gradients: &[1], gradient_type: "float32", ..COMPILED },
    COMPILED,
    Goal {
        rule: "adam-text",
        field: "ratio_to_built_in",
        least: 0.95,
        about: "a user's rule, share of the built-in one's speed",
        ..ADAM
    },
    Goal { what: SERVER_STEP, least: 0.85, about: "share of the link, both ways at once", ..ADAM },
];

/// A line for each goal of these measures and number of gradients: met, missed, or why nobody can say.
pub(super) fn verdicts(results: &[Outcome], measures: &[&str]) -> Vec<Outcome> {
    let of = |goal: &'static Goal| goal.gradients.iter().map(move |gradients| (goal, *gradients));
    GOALS
        .iter()
        .filter(|goal| measures.contains(&goal.what))
        .flat_map(of)
        .map(|(goal, gradients)| verdict(results, goal, gradients))
        .collect()
}

fn verdict(results: &[Outcome], goal: &Goal, gradients: u32) -> Outcome {
    let named = format!("goal: {}, {gradients} {}, {}: {}", goal.rule, goal.gradient_type, goal.what, goal.about);
    let line = Outcome::new(&named).with("what", "goal").with("goal", goal.least);
    let line = line.without_ratio("a goal, whose figure is found");
    let is_goal = |result: &&Outcome| {
        result.field("what") == goal.what
            && result.field("rule") == goal.rule
            && result.field("gradients").as_u64() == Some(gradients.into())
            && result.field("gradient_type") == goal.gradient_type
    };
    let Some(found) = results.iter().find(is_goal) else { return line.with("verdict", "not measured") };
    let Some(ratio) = found.field(goal.field).as_f64() else {
        let why = found.field("verdict").as_str().unwrap_or("not measured");
        return line.with("verdict", why);
    };
    let word = if goal.least <= ratio { "met" } else { "missed" };
    let elements = found.field("elements").as_u64().unwrap_or(0);
    let is_short = goal.what == KERNEL && elements < ELEMENTS;
    let verdict = if is_short { format!("{word}, at {elements} elements") } else { word.to_owned() };
    line.with("found", ratio).with("verdict", verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(results: &[Outcome], expected: &[(&str, &str)]) {
        let found = verdicts(results, &[KERNEL, SERVER_STEP]);
        assert_eq!(found.len(), 15, "a line for each goal and number of gradients");
        assert_eq!(verdicts(results, &[SERVER_STEP]).len(), 3, "nothing else was to be measured");
        for (start, verdict) in expected {
            let line = found.iter().find(|one| one.name().starts_with(start)).expect("there is such a goal");
            assert_eq!(line.field("verdict"), verdict, "{start}");
        }
    }

    fn line(rule: &str, what: &str, elements: u64) -> Outcome {
        let named = Outcome::new("x").with("rule", rule).with("what", what).with("gradients", 8);
        named.with("gradient_type", "bfloat16").with("elements", elements)
    }

    #[test]
    fn a_goal_is_met_missed_or_not_measured() {
        check(&[], &[("goal: adam, 8 bfloat16, kernel: share", "not measured")]);
        let good = line("adam", KERNEL, ELEMENTS).with("ratio_to_ceiling", 0.9).with("ratio_to_torch", 1.99);
        let share = ("goal: adam, 8 bfloat16, kernel: share", "met");
        check(&[good], &[share, ("goal: adam, 8 bfloat16, kernel: times", "missed")]);
        let short = line("adam", KERNEL, 7).with("ratio_to_ceiling", 0.95);
        check(&[short], &[("goal: adam, 8 bfloat16, kernel: share", "met, at 7 elements")]);
        let step = line("adam", SERVER_STEP, 7).with("ratio_to_ceiling", 0.84);
        check(&[step], &[("goal: adam, 8 bfloat16, server step", "missed")]);
        let without = line("adam-text", KERNEL, 7).with("verdict", "left out: no compiler");
        check(&[without], &[("goal: adam-text, 8 bfloat16", "left out: no compiler")]);
    }
}
