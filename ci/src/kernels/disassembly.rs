//! What the compiler and the disassembler say of the kernels.

/// Kernels that put registers into memory, from the report of `ptxas -v`.
pub(super) fn spills(report: &str) -> Vec<String> {
    let mut name = "";
    let mut findings = Vec::new();
    for line in report.lines() {
        if let Some(entry) = line.split("Compiling entry function '").nth(1) {
            name = entry.split('\'').next().unwrap_or(entry);
        } else if line.contains("bytes stack frame") && !line.contains(" 0 bytes stack frame, 0 bytes spill stores, 0 ")
        {
            let counts = line.rsplit("  ").next().unwrap_or(line).trim();
            findings.push(format!("{name}: {counts}; expected none"));
        }
    }
    if name.is_empty() {
        findings.push("the compiler reports no kernel".to_owned());
    }
    findings
}

/// Kernels that move tensors, by the beginning of their names: whether they read them, and whether they write them.
const MOVERS: [(&str, bool, bool); 9] = [
    ("pserver_update_f32_", true, true),
    ("pserver_update_f64_", true, true),
    ("pserver_rows_f32_", true, true),
    ("pserver_rows_f64_", true, true),
    ("pserver_sum_f", true, true),
    ("pserver_sum_u", true, true),
    ("pserver_cast", true, true),
    ("pserver_squares_", true, false),
    ("pserver_finite", true, false),
];

/// Kernels that do not move tensors 16 bytes at a time, or that use memory of their own, from `nvdisasm -c`.
pub(super) fn narrow(code: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let mut found = [0; MOVERS.len()];
    for section in code.split("\n//----").filter(|section| section.contains(".text.pserver_")) {
        let name = section.split(".text.").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or("a kernel");
        for refused in [" LDL", " STL"] {
            if section.contains(refused) {
                findings.push(format!("{name} has{refused}: it uses memory of its own"));
            }
        }
        let Some(kind) = MOVERS.iter().position(|(prefix, ..)| name.starts_with(prefix)) else { continue };
        found[kind] += 1;
        let (_, reads, writes) = MOVERS[kind];
        for wanted in [(reads, "LDG.E.128"), (writes, "STG.E.128")].iter().filter_map(|(is, name)| is.then_some(*name))
        {
            // Through an address that may be anywhere the same instruction has no G.
            if !section.contains(wanted) && !section.contains(&wanted.replace("G.", ".")) {
                findings.push(format!("{name} has no {wanted}"));
            }
        }
    }
    let missing = MOVERS.iter().zip(found).filter(|(_, found)| *found == 0);
    findings.extend(missing.map(|((prefix, ..), _)| format!("the disassembly has no {prefix}")));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(report: &str, expected: &[&str]) {
        assert_eq!(spills(report), expected);
    }

    #[test]
    fn a_kernel_that_spills_is_named() {
        let head = "ptxas info    : Compiling entry function 'one' for 'sm_90'\n";
        check(&format!("{head}ptxas   .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"), &[]);
        check(
            &format!("{head}ptxas   .     8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads\n"),
            &["one: 8 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads; expected none"],
        );
        check("", &["the compiler reports no kernel"]);
    }

    #[test]
    fn a_kernel_that_moves_less_than_16_bytes_is_named() {
        let section = |name: &str, body: &str| format!("\n//---- .text.{name} ----\n{body}");
        let both = " LDG.E.128 R4, STG.E.128 R8";
        let whole = |(prefix, ..): &(&str, bool, bool)| section(&format!("{prefix}0"), both);
        let all: String = MOVERS.iter().map(whole).collect();
        let check = |more: &str, expected: &[&str]| assert_eq!(narrow(&format!("{all}{more}")), expected);
        check("", &[]);
        check(&section("pserver_scan", " LDG.E"), &[]);
        check(&section("pserver_squares_f32", " LD.E.128"), &[]);
        check(&section("pserver_update_f32_0", " LDG.E R4, STG.E.128 R8"), &["pserver_update_f32_0 has no LDG.E.128"]);
        check(&section("pserver_update_f64_0", " LDG.E.128, STG.E"), &["pserver_update_f64_0 has no STG.E.128"]);
        check(
            &section("pserver_sum_u64", ""),
            &["pserver_sum_u64 has no LDG.E.128", "pserver_sum_u64 has no STG.E.128"],
        );
        check(&section("pserver_cast", " LDG.E.128, STG.E.64"), &["pserver_cast has no STG.E.128"]);
        check(&section("pserver_scan", " STL"), &["pserver_scan has STL: it uses memory of its own"]);
        assert_eq!(narrow("").len(), MOVERS.len());
        assert_eq!(narrow("")[0], "the disassembly has no pserver_update_f32_");
    }
}
