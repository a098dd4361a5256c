//! One page with the SVG diagram, which is moved by the pointer and made larger or smaller by the wheel. It loads
//! nothing from elsewhere.

use crate::transpile::part::ProgramPart;

const BEGIN: &str = r#"<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>Parts of a program</title>
<style>
html, body { margin: 0; height: 100%; overflow: hidden; font-family: sans-serif; }
svg { width: 100%; height: 100%; cursor: grab; touch-action: none; }
p { position: fixed; right: 12px; bottom: 4px; color: #666; font-size: 12px; }
</style>
</head>
<body>
"#;

const END: &str = r#"<p>Drag to move, wheel to zoom, double click to see everything.</p>
<script>
"use strict";
const picture = document.querySelector("svg");
const whole = picture.getAttribute("viewBox").split(" ").map(Number);
let view = whole.slice();
let last = null;
picture.removeAttribute("width");
picture.removeAttribute("height");
const show = () => picture.setAttribute("viewBox", view.join(" "));
const scale = () => Math.max(view[2] / picture.clientWidth, view[3] / picture.clientHeight);
picture.addEventListener("wheel", event => {
  event.preventDefault();
  const factor = Math.exp(Math.sign(event.deltaY) * 0.15);
  const box = picture.getBoundingClientRect();
  const across = (event.clientX - box.left) / box.width, down = (event.clientY - box.top) / box.height;
  view = [view[0] + view[2] * across * (1 - factor), view[1] + view[3] * down * (1 - factor),
    view[2] * factor, view[3] * factor];
  show();
}, { passive: false });
picture.addEventListener("pointerdown", event => {
  last = [event.clientX, event.clientY];
  picture.setPointerCapture(event.pointerId);
});
picture.addEventListener("pointermove", event => {
  if (last === null) return;
  view[0] -= (event.clientX - last[0]) * scale();
  view[1] -= (event.clientY - last[1]) * scale();
  last = [event.clientX, event.clientY];
  show();
});
picture.addEventListener("pointerup", () => { last = null; });
picture.addEventListener("dblclick", () => { view = whole.slice(); show(); });
</script>
</body>
</html>
"#;

/// The page.
#[must_use]
pub fn html(parts: &[ProgramPart]) -> String {
    format!("{BEGIN}{}{END}", super::svg(parts))
}
