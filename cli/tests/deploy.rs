//! Files of `deploy/`: Kubernetes manifests against typed schemas, the systemd unit, and a server's readiness.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::batch::v1::Job;
use k8s_openapi::api::core::v1::{Container, EnvVar, PersistentVolumeClaim, PodSpec, Service};
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use pserver_kernels::conformance::skips::skip;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn manifests() -> Vec<Value> {
    let text = read("kubernetes.yaml");
    serde_norway::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("it is YAML")).collect()
}

/// The document as its type, which must know every field.
fn typed<T: DeserializeOwned + Serialize>(document: &Value) -> Result<T, String> {
    let typed: T = serde_json::from_value(document.clone()).map_err(|error| error.to_string())?;
    let again = serde_json::to_value(&typed).map_err(|error| error.to_string())?;
    match lost(document, &again, "") {
        None => Ok(typed),
        Some(path) => Err(format!("{path} is no field, or has another type")),
    }
}

/// A path that is in the first value and not, or otherwise, in the second.
fn lost(document: &Value, again: &Value, path: &str) -> Option<String> {
    match (document, again) {
        (Value::Object(one), Value::Object(other)) => one.iter().find_map(|(key, value)| {
            let path = format!("{path}.{key}");
            other.get(key).map_or(Some(path.clone()), |other| lost(value, other, &path))
        }),
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            let mut pairs = one.iter().zip(other).enumerate();
            pairs.find_map(|(place, (one, other))| lost(one, other, &format!("{path}[{place}]")))
        }
        _ => (document != again).then(|| path.to_owned()),
    }
}

fn environment(container: &Container) -> BTreeMap<String, String> {
    let text = |one: &EnvVar| Some((one.name.clone(), one.value.clone()?.replace("$(POD_NAME)", "pserver-1")));
    container.env.iter().flatten().filter_map(text).collect()
}

/// Standard output of `pserver` in an environment; it must succeed.
fn pserver(arguments: &[&str], variables: &BTreeMap<String, String>) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    let ended = command.args(arguments).env_clear().envs(variables).output().expect("the program can be run");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(ended.status.success() && ended.stderr.is_empty(), "{arguments:?}: {}", text(&ended.stderr));
    text(&ended.stdout)
}

#[test]
fn manifests_have_only_fields_of_kubernetes_and_fit_together() {
    let [service, models, budget, servers, trainers] = &manifests()[..] else { panic!("five documents") };
    let service: Service = typed(service).expect("a Service");
    let models: PersistentVolumeClaim = typed(models).expect("a claim");
    let budget: PodDisruptionBudget = typed(budget).expect("a budget");
    let servers: StatefulSet = typed(servers).expect("a StatefulSet");
    let trainers: Job = typed(trainers).expect("a Job");
    let (of_service, of_servers, of_trainers) =
        (service.spec.expect("a spec"), servers.spec, trainers.spec.expect("a spec"));
    assert_eq!(of_service.selector, of_servers.selector.match_labels);
    let guarded = budget.spec.and_then(|spec| spec.selector).and_then(|selector| selector.match_labels);
    assert_eq!(guarded, of_servers.selector.match_labels);
    let pods = [of_servers.template.spec.clone(), of_trainers.template.spec.clone()].map(|pod| pod.expect("a pod"));
    pods.iter().for_each(|pod| check_pod(pod, models.metadata.name.as_deref()));
    assert_eq!(of_service.selector, of_servers.template.metadata.expect("metadata").labels);
    assert_eq!(of_servers.service_name, service.metadata.name);
    assert_eq!(
        (of_trainers.completion_mode.as_deref(), of_trainers.completions),
        (Some("Indexed"), of_trainers.parallelism)
    );

    let server = &of_servers.template.spec.expect("a pod").containers[0];
    let mut variables = environment(server);
    let index = server.env.iter().flatten().find(|one| one.name == "PSERVER_INDEX").expect("an index");
    let field = index.value_from.as_ref().and_then(|from| from.field_ref.as_ref()).map(|field| &*field.field_path);
    assert_eq!(field, Some("metadata.labels['apps.kubernetes.io/pod-index']"));
    variables.insert("PSERVER_INDEX".to_owned(), "1".to_owned());
    let settings = pserver(&["serve", "--print-config"], &variables);
    let counts = (of_servers.replicas.expect("replicas"), of_trainers.completions.expect("completions"));
    for line in [
        "index = 1 # PSERVER_INDEX".to_owned(),
        format!("servers = {} # PSERVER_SERVERS", counts.0),
        format!("trainers = {} # PSERVER_TRAINERS", counts.1),
        "advertise = \"pserver-1.pserver:7164\" # PSERVER_ADVERTISE".to_owned(),
        "coordinator = \"pserver-0.pserver:7164\" # PSERVER_COORDINATOR".to_owned(),
    ] {
        assert!(settings.lines().any(|found| found == line), "{line}:\n{settings}");
    }

    let folder = tempfile::TempDir::new().expect("there is room");
    let token = folder.path().join("token");
    fs::write(&token, "0123456789abcdef0123456789abcdef").expect("a file");
    let mut variables = environment(&of_trainers.template.spec.expect("a pod").containers[0]);
    variables.insert("PSERVER_TOKEN_FILE".to_owned(), token.display().to_string());
    variables.insert("JOB_COMPLETION_INDEX".to_owned(), "3".to_owned());
    let found = pserver(&["env"], &variables);
    for line in
        ["coordinator = pserver-0.pserver:7164 (from PSERVER_COORDINATOR)", "trainer = 3 (from JOB_COMPLETION_INDEX)"]
    {
        assert!(found.lines().any(|one| one == line), "{line}:\n{found}");
    }
}

/// Checks the requirements of a cluster on every pod: no root, bounded memory, and volumes that exist.
fn check_pod(pod: &PodSpec, models: Option<&str>) {
    let security = pod.security_context.as_ref().expect("a security context");
    assert_eq!(security.run_as_non_root, Some(true));
    assert_eq!(pod.automount_service_account_token, Some(false));
    let volumes = pod.volumes.as_deref().unwrap_or_default();
    let claims: Vec<_> = volumes.iter().filter_map(|volume| volume.persistent_volume_claim.as_ref()).collect();
    assert!(claims.iter().any(|claim| Some(&*claim.claim_name) == models), "{claims:?}");
    let container = &pod.containers[0];
    let resources = container.resources.as_ref().expect("resources");
    let memory = |all: &Option<BTreeMap<_, _>>| all.as_ref().and_then(|all| all.get("memory").cloned());
    assert!(memory(&resources.limits).is_some() && memory(&resources.limits) == memory(&resources.requests));
    let security = container.security_context.as_ref().expect("a security context");
    assert_eq!(security.allow_privilege_escalation, Some(false));
    for probe in container.readiness_probe.iter().chain(&container.liveness_probe) {
        assert!(probe.http_get.is_some() && probe.tcp_socket.is_none(), "a port is open before the server is ready");
    }
}

#[test]
fn a_field_that_kubernetes_does_not_have_is_found() {
    let all = manifests();
    let mut document = all[3].clone();
    document["spec"]["template"]["spec"]["containers"][0]["enviroment"] = Value::from(1);
    let failure = typed::<StatefulSet>(&document).err();
    assert_eq!(
        failure.as_deref(),
        Some(".spec.template.spec.containers[0].enviroment is no field, or has another type")
    );
}

#[test]
fn systemd_knows_every_line_of_the_unit() {
    if Command::new("systemd-analyze").arg("--version").stdout(Stdio::null()).status().is_err() {
        skip("systemd-analyze", "it is not installed");
        return;
    }
    let folder = tempfile::TempDir::new().expect("there is room");
    let unit = folder.path().join("pserver.service");
    let text = read("pserver.service").replace("/usr/bin/pserver", env!("CARGO_BIN_EXE_pserver"));
    let verify = |text: &str| {
        fs::write(&unit, text).expect("a file");
        let ended = Command::new("systemd-analyze").args(["verify", "--man=no"]).arg(&unit).output().expect("it runs");
        (ended.status.success(), String::from_utf8_lossy(&ended.stderr).into_owned())
    };
    assert_eq!(verify(&text), (true, String::new()));
    assert!(verify(&text.replace("Restart=", "Restrat=")).1.contains("Unknown key 'Restrat'"));
}

/// The next message on the socket of a service manager.
fn received(socket: &UnixDatagram) -> String {
    let mut bytes = [0; 4096];
    let length = socket.recv(&mut bytes).expect("the server tells its manager");
    String::from_utf8_lossy(&bytes[..length]).into_owned()
}

#[test]
fn a_server_tells_its_service_manager_when_it_is_ready_and_when_it_stops() {
    let folder = tempfile::TempDir::new().expect("there is room");
    let path: PathBuf = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).expect("a socket");
    socket.set_read_timeout(Some(Duration::from_secs(60))).expect("a bound in time");
    let mut command = Command::new(env!("CARGO_BIN_EXE_pserver"));
    command.args(["serve", "--bind", "127.0.0.1:0"]).env_clear().env("NOTIFY_SOCKET", &path).current_dir(folder.path());
    let mut server = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("the program can be run");
    let ready = received(&socket);
    assert!(ready.starts_with("READY=1\nSTATUS=serving at 127.0.0.1:"), "{ready}");
    kill(Pid::from_raw(i32::try_from(server.id()).expect("it is positive")), Signal::SIGTERM).expect("it runs");
    assert_eq!(received(&socket), "STOPPING=1\n");
    assert!(server.wait().expect("it is a child").success());
}
