//! The terminal: it shows the lines of a status, and is left as it was.
//!
//! `ratatui` restores the terminal at a panic; at a signal the loop ends, and restores it then.

use std::io::IsTerminal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyEventKind, KeyModifiers};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::Line;
use ratatui::widgets::Paragraph;
use ratatui::{DefaultTerminal, Frame};

use super::PERIOD;
use super::fetch::StatusSource;
use super::text::{LineTone, StatusLine, StatusView};

/// Longest wait for a key, after which signals are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Shows a job until q, escape, control-C or a signal.
pub(super) fn show(source: &StatusSource) -> Result<()> {
    ensure!(std::io::stdout().is_terminal(), "standard output is no terminal; expected one, or --once");
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [signal_hook::consts::SIGTERM, signal_hook::consts::SIGINT, signal_hook::consts::SIGHUP] {
        signal_hook::flag::register(signal, Arc::clone(&is_over)).context("waiting for signals")?;
    }
    let terminal = ratatui::try_init().context("using the terminal")?;
    let shown = follow(terminal, source, &is_over);
    ratatui::restore();
    shown
}

fn follow(mut terminal: DefaultTerminal, source: &StatusSource, is_over: &AtomicBool) -> Result<()> {
    let (mut view, mut trouble, mut scroll) = (StatusView::default(), None, 0_u16);
    let mut due = Instant::now();
    while !is_over.load(Ordering::Acquire) {
        if due <= Instant::now() {
            due = Instant::now() + PERIOD;
            trouble = match source.fetch() {
                Ok(status) => {
                    view.take(status);
                    None
                }
                Err(error) => Some(format!("{error:#}")),
            };
        }
        let mut lines = view.lines();
        lines.insert(0, first_line(source, trouble.as_deref()));
        let longest = u16::try_from(lines.len().saturating_sub(1)).unwrap_or(u16::MAX);
        scroll = scroll.min(longest);
        terminal.draw(|frame| draw(frame, &lines, scroll)).context("drawing")?;
        if event::poll(LOOK).context("reading keys")?
            && let Event::Key(key) = event::read().context("reading keys")?
            && key.kind != KeyEventKind::Release
        {
            match key.code {
                KeyCode::Char('q') | KeyCode::Esc => return Ok(()),
                KeyCode::Char('c') if key.modifiers.contains(KeyModifiers::CONTROL) => return Ok(()),
                KeyCode::Down => scroll = scroll.saturating_add(1),
                KeyCode::Up => scroll = scroll.saturating_sub(1),
                KeyCode::PageDown => scroll = scroll.saturating_add(10),
                KeyCode::PageUp => scroll = scroll.saturating_sub(10),
                KeyCode::Home => scroll = 0,
                _ => {}
            }
        }
    }
    Ok(())
}

fn first_line(source: &StatusSource, trouble: Option<&str>) -> StatusLine {
    match trouble {
        Some(text) => StatusLine { text: text.to_owned(), tone: LineTone::Alert },
        None => {
            let text = format!("http://{}/   q: end, arrows: scroll", source.address());
            StatusLine { text, tone: LineTone::Plain }
        }
    }
}

fn draw(frame: &mut Frame<'_>, lines: &[StatusLine], scroll: u16) {
    let style = |tone| match tone {
        LineTone::Plain => Style::new(),
        LineTone::Head => Style::new().add_modifier(Modifier::BOLD | Modifier::UNDERLINED),
        LineTone::Alert => Style::new().fg(Color::Red).add_modifier(Modifier::BOLD),
    };
    let lines: Vec<Line<'_>> = lines.iter().map(|line| Line::styled(line.text.as_str(), style(line.tone))).collect();
    frame.render_widget(Paragraph::new(lines).scroll((scroll, 0)), frame.area());
}
