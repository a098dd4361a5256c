use super::*;
#[test]
fn first() {
    let text = "param mu in [0, 1) = 0.9; state m = 0; m = mu*m + g; w = w - lr*m";
    let rule = Written::new(text, &Settings::new()).unwrap();
    println!("{}\n{:#?}", rule.syntax(), rule.lower().unwrap());
}
