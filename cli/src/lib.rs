//! The `pserver` program: `serve`, `launch`, `env`, `quickstart`, `transpile`, `import-paddle`, `convert`, `train`,
//! `predict`, `top`, `needs`, `inspect`.
//!
//! Not here: a server process (`pserver_node`), a trainer's calls (`pserver_client`), the C library
//! (`paddle_pserver`).
//!
//! Read in this order: [`commands`] (subcommands), [`logging`] (what is logged, limited by rate), [`quickstart`] (the
//! example job), [`launch`] (the processes of a job), [`mod@env`] (what a process finds of its job), [`transpile`] (the
//! division of a program), [`import_paddle`], [`program_file`], [`train`], [`predict`],
//! [`top`] (a job in a terminal), `needs` (sizes of servers), `inspect`, [`pages`] (the manual).

pub mod commands;
mod descriptors;
pub mod env;
pub mod import_paddle;
mod inspect;
pub mod launch;
mod local_servers;
pub mod logging;
mod needs;
mod notification;
mod own_program;
pub mod pages;
pub mod predict;
pub mod program_file;
pub mod quickstart;
pub mod top;
pub mod train;
pub mod transpile;
