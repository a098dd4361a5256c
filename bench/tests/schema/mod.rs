//! The part of JSON Schema that `psbench.schema.json` and `node/status.schema.json` are written in.

use serde_json::Value;

/// The first violation of a schema in a value and its place; none where the value is valid.
///
/// # Panics
/// When the schema has an unknown keyword, because its rule would not be checked.
pub(crate) fn refusals(schema: &Value, value: &Value, place: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (keyword, rule) in schema.as_object().expect("a schema is an object") {
        match keyword.as_str() {
            "$schema" | "$id" | "title" | "description" => {}
            "type" if !has_type(rule, value) => found.push(format!("{place}: {value} is not {rule}")),
            "const" if rule != value => found.push(format!("{place}: {value} is not {rule}")),
            "enum" if !rule.as_array().is_some_and(|all| all.contains(value)) => {
                found.push(format!("{place}: {value} is none of {rule}"));
            }
            "minimum" if value.as_f64() < rule.as_f64() && value.is_number() => {
                found.push(format!("{place}: {value} is below {rule}"));
            }
            "required" if value.is_object() => {
                let names = rule.as_array().into_iter().flatten().filter_map(Value::as_str);
                found.extend(names.filter(|name| value.get(name).is_none()).map(|name| format!("{place}: no {name}")));
            }
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                found.extend(items.flat_map(|(index, item)| refusals(rule, item, &format!("{place}[{index}]"))));
            }
            "properties" => found.extend(members(value).flat_map(|(name, member)| {
                rule.get(name).map_or_else(Vec::new, |schema| refusals(schema, member, &format!("{place}.{name}")))
            })),
            "additionalProperties" => {
                let others = members(value).filter(|(name, _)| schema["properties"].get(name).is_none());
                found.extend(others.flat_map(|(name, member)| match rule {
                    Value::Bool(false) => vec![format!("{place}: {name} is not known")],
                    rule => refusals(rule, member, &format!("{place}.{name}")),
                }));
            }
            "type" | "const" | "enum" | "minimum" | "required" => {}
            other => panic!("{place}: the schema's \"{other}\" is not understood here"),
        }
    }
    found
}

fn members(value: &Value) -> impl Iterator<Item = (&String, &Value)> {
    value.as_object().into_iter().flatten()
}

fn has_type(rule: &Value, value: &Value) -> bool {
    match rule {
        Value::Array(any) => any.iter().any(|one| has_type(one, value)),
        _ => match rule.as_str().expect("a type is a word") {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "number" => value.is_number(),
            "integer" => value.is_u64() || value.is_i64(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            other => panic!("the type \"{other}\" is not understood here"),
        },
    }
}
