//! Checks on the output of the compiler and of the disassembler.

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
        findings.extend(waits(name, section));
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

/// Gradients that are asked for before the first of them is added.
const ASKED_AT_ONCE: usize = 4;

/// How an update or a sum waits for memory where it need not: for what it was handed, which is in the constant bank;
/// for each gradient before it asks for the next.
fn waits(name: &str, section: &str) -> Vec<String> {
    let mut findings = Vec::new();
    if !name.starts_with("pserver_update_") && !name.starts_with("pserver_sum_") {
        return findings;
    }
    if section.contains(" LD.E") {
        findings.push(format!("{name} has LD.E: it does not know that an address is of the device's memory"));
    }
    // In the parameter's own type, and as halves of either kind, of which a pack has half as many bytes.
    let wanted: &[(usize, &str)] = match name.split('_').nth(2) {
        Some("f32") => &[(1, "LDG.E.128 "), (2, "LDG.E.64 ")],
        Some("f64") => &[(1, "LDG.E.128 "), (2, "LDG.E ")],
        _ => &[],
    };
    for (times, load) in wanted {
        let found = blocks(section).filter(|block| ASKED_AT_ONCE <= asked_before_an_add(block, load)).count();
        if found < *times {
            let text = "loops that ask for as many gradients at once as one thread waits for";
            findings.push(format!("{name} has {found} {text}, by {ASKED_AT_ONCE} {load}; expected {times}"));
        }
    }
    findings
}

/// Instructions between which nothing jumps.
fn blocks(section: &str) -> impl Iterator<Item = Vec<&str>> {
    let mut left = section.lines();
    std::iter::from_fn(move || {
        let is_end = |line: &str| line.trim_start().starts_with(".L") || line.contains(" BRA ");
        let mut block = Vec::new();
        for line in left.by_ref() {
            if is_end(line) {
                return Some(block);
            }
            block.push(line);
        }
        (!block.is_empty()).then_some(block)
    })
}

/// Loads of this kind before the first sum, if the block takes addresses by number out of the constant bank.
fn asked_before_an_add(block: &[&str], load: &str) -> usize {
    if block.iter().filter(|line| line.contains(" c[0x0][R")).count() < ASKED_AT_ONCE {
        return 0;
    }
    let asks = block.iter().take_while(|line| !line.contains(" FADD") && !line.contains(" DADD"));
    asks.filter(|line| line.contains(load)).count()
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

    /// The loads in the loops of an update: in its own type, then in half precision, for binary32 and for binary64.
    const LOOPS: [&str; 5] = ["LDG.E.128 ", "LDG.E.64 ", "LDG.E.64 ", "LDG.E ", "LDG.E "];

    /// A loop that asks for so many before it adds the first, and for four in all.
    fn asking(before: usize, load: &str) -> String {
        let ask = format!(" LDC.64 R8, c[0x0][R3+0x210] ;\n @P0 {load}R4, desc[UR12][R8.64] ;\n");
        format!(".L_1:\n{} FADD R1, R1, R4 ;\n{}.L_2:\n", ask.repeat(before), ask.repeat(4 - before))
    }

    #[test]
    fn an_update_kernel_without_overlapping_loads_is_named() {
        let found = |loops: [String; 5]| waits("pserver_update_f32_0", &loops.concat());
        let expected = |found: usize, load: &str, times: usize| {
            let what = "loops that ask for as many gradients at once as one thread waits for";
            vec![format!("pserver_update_f32_0 has {found} {what}, by 4 {load}; expected {times}")]
        };
        let whole = LOOPS.map(|load| asking(4, load));
        assert_eq!(found(whole.clone()), Vec::<String>::new());
        let [own, .., half, _, _] = &whole;
        let late = |load| asking(1, load);
        assert_eq!(found([late(LOOPS[0]), half.clone(), half.clone(), own.clone(), late(LOOPS[1])]), [""; 0]);
        assert_eq!(found(whole.clone().map(|text| text.replace("c[0x0][R3+0x210]", "desc[R3]"))).len(), 2);
        assert_eq!(
            found([late(LOOPS[0]), half.clone(), half.clone(), half.clone(), half.clone()]),
            expected(0, LOOPS[0], 1)
        );
        assert_eq!(
            found([own.clone(), half.clone(), late(LOOPS[1]), own.clone(), own.clone()]),
            expected(1, LOOPS[1], 2)
        );
        let generic = format!("{} LD.E R1, desc[UR12][R2.64] ;\n", whole.concat());
        assert!(waits("pserver_sum_f32", &generic)[0].starts_with("pserver_sum_f32 has LD.E"));
        assert_eq!(waits("pserver_rows_f32_0", &generic), [""; 0]);
        assert_eq!(waits("pserver_sum_u64", &whole.concat()), [""; 0]);
    }

    #[test]
    fn a_kernel_that_moves_less_than_16_bytes_is_named() {
        let section = |name: &str, body: &str| format!("\n//---- .text.{name} ----\n{body}");
        let both = format!(" STG.E.128 R8\n{}", LOOPS.map(|load| asking(4, load)).concat());
        let whole = |(prefix, ..): &(&str, bool, bool)| section(&format!("{prefix}0"), &both);
        let all: String = MOVERS.iter().map(whole).collect();
        let check = |more: &str, expected: &[&str]| assert_eq!(narrow(&format!("{all}{more}")), expected);
        check("", &[]);
        check(&section("pserver_scan", " LDG.E"), &[]);
        check(&section("pserver_squares_f32", " LD.E.128"), &[]);
        check(&section("pserver_rows_f32_0", " LDG.E R4, STG.E.128 R8"), &["pserver_rows_f32_0 has no LDG.E.128"]);
        check(&section("pserver_rows_f64_0", " LDG.E.128, STG.E"), &["pserver_rows_f64_0 has no STG.E.128"]);
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
