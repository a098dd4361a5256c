//! Named rules of the project that are defined by a text alone.

/// The texts by name.
const TEXTS: [(&str, &str); 3] = [
    ("lamb", include_str!("../../rules/lamb.rule")),
    ("lars", include_str!("../../rules/lars.rule")),
    ("lion", include_str!("../../rules/lion.rule")),
];

/// The text of the rule with this name.
pub(crate) fn text(name: &str) -> Option<&'static str> {
    TEXTS.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}

/// Every name, as errors list them.
pub(crate) fn names() -> String {
    TEXTS.map(|(name, _)| name).join(", ")
}
