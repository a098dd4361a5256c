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

/// Updates of binary32 that do not move 16 bytes at a time, or that use memory of their own, from `nvdisasm -c`.
pub(super) fn narrow(code: &str) -> Vec<String> {
    let mut findings = Vec::new();
    let mut kernels = 0;
    for section in code.split("\n//----").filter(|section| section.contains(".text.pserver_update_f32_")) {
        let name = section.split(".text.").nth(1).and_then(|rest| rest.split_whitespace().next()).unwrap_or("a kernel");
        kernels += 1;
        for wanted in ["LDG.E.128", "STG.E.128"] {
            // Through an address that may be anywhere the same instruction has no G.
            if !section.contains(wanted) && !section.contains(&wanted.replace("G.", ".")) {
                findings.push(format!("{name} has no {wanted}"));
            }
        }
        for refused in [" LDL", " STL"] {
            if section.contains(refused) {
                findings.push(format!("{name} has{refused}: it uses memory of its own"));
            }
        }
    }
    if kernels == 0 {
        findings.push("the disassembly has no pserver_update_f32".to_owned());
    }
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
    fn an_update_that_moves_less_than_16_bytes_is_named() {
        let section = |body: &str| format!("\n//---- .text.pserver_update_f32_0 ----\n{body}");
        assert!(narrow(&section(" LDG.E.128 R4, STG.E.128 R8")).is_empty());
        assert_eq!(narrow(&section(" LDG.E R4, STG.E.128 R8")), ["pserver_update_f32_0 has no LDG.E.128"]);
        assert_eq!(
            narrow(&section(" LDG.E.128, STG.E.128, STL")),
            ["pserver_update_f32_0 has STL: it uses memory of its own"]
        );
        assert_eq!(narrow(""), ["the disassembly has no pserver_update_f32"]);
    }
}
