"""Define and read what jobs are made from: the facts of the folder `jobs/`, and a request."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator

from imagebuild.bench.models import Collective
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import Condition, Form, Loc, Model, Variable, YamlFile
from imagebuild.core.yaml import dotted_key, load_yaml

Scheduler = Literal["mpijob", "jobset", "slurm"]
"""What starts a job. Each has a file of `jobs/schedulers/` and a template of its name."""
Container = Literal["kubernetes", "pyxis", "none"]
Scope = Literal["rank", "container", "launcher", "batch"]

Text = Annotated[str, Form(r"[^\n\r\x00]*", "one line")]
# A shell or a file on the way to the rank would interpret quotes and backslashes.
VALUE_FORM = Form(r"""[^'"`\\\x00-\x1f\x7f]*""", "one line without quotes and backslashes")
Value = Annotated[str, VALUE_FORM]
Bytes = Annotated[str, Form("[1-9][0-9]*[KMG]?", "a size as nccl-tests takes it, such as 512M")]

# Texts as Kubernetes wants them; its API server refuses others.
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
GPUS = r"nvidia\.com/(gpu|mig-.*)"
QUALIFIED = f"{DOMAIN.replace('$', '/')}/{VALUE}"
AMOUNT = r"(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE]|[eE][0-9]+)?"
OPERATORS_LABEL = re.compile(
    r"(training\.kubeflow\.org|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/.*|job-name|controller-uid"
)
QUANTITY = Form(AMOUNT, "a quantity of Kubernetes such as 110, 500m, 960Gi or 960G")
Label = Annotated[str, Form(LABEL, "a name of Kubernetes: up to 63 of a-z, 0-9 and -")]
DomainName = Annotated[str, Form(DOMAIN, "a name of Kubernetes: a-z, 0-9, - and dots")]
Key = Annotated[str, Form(f"{QUALIFIED}|{VALUE}", "a key of Kubernetes such as example.com/name")]
LabelValue = Annotated[str, Form(f"({VALUE})?", "a value of a label: up to 63 of A-Z, a-z, 0-9, -, _ and .")]
Quantity = Annotated[str, QUANTITY]
CPUS = Form(r"(?=[0-9.]*[1-9])([0-9]{1,4}(\.[0-9]{1,3})?|[0-9]{1,7}m)", "a number of CPUs such as 110, 2.5 or 500m")
COUNT = Form(r"[1-9][0-9]*([kMGTPE]|[KMGTPE]i)?|\{[a-z]+\}", "a number, such as 8 or 5120Mi, or {cards}")
Count = Annotated[str, COUNT]
Folder = Annotated[str, Form(r"(?!.*/\.\.(/|$))/[^\n\r\x00:]*", "a path that begins with / and has no colon and no ..")]
Resource = Annotated[str, Form(f"cpu|memory|hugepages-{AMOUNT}|{QUALIFIED}", "a resource such as rdma/ib or cpu")]
Gpu = Annotated[str, Form(r"[a-z]{1,3}[0-9]{2,4}", "a GPU as in names of jobs, such as h100")]
HostType = Literal["Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice"]

REGISTRY = Form(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)*", "a registry and folder such as ghcr.io/acme")

# Texts as sbatch wants them
NAME = "[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
RESOURCE = r"[A-Za-z_]\w*(:[0-9]*[A-Za-z_][\w.+-]*)?(:[1-9][0-9]*[kKmMgGtT]?)?"
HOSTS = r"[A-Za-z0-9_][\w.-]*(\[[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\][\w.-]*)*"
MODULE = "[A-Za-z0-9._/][A-Za-z0-9._/+-]*"
MODULES = Form(f"{MODULE}( +{MODULE})*", "names of modules such as openmpi/5, with blanks between them")
SLURM_FORMS = {
    "account": Form(NAME, "a name without blanks"),
    **dict.fromkeys(("partition", "qos", "reservation"), Form(f"{NAME}(,{NAME})*", "names with commas between them")),
    "constraint": Form(r"[A-Za-z0-9_([][A-Za-z0-9_.,=:&|*()\[\]/-]*", "features of nodes as sbatch takes them"),
    "gres": Form(f"{RESOURCE}(,{RESOURCE})*", "resources of a node such as gpu:8 or gpu:h100:8"),
    **dict.fromkeys(("nodelist", "exclude"), Form(f"{HOSTS}(,{HOSTS})*", "names of nodes such as node[01-04],node9")),
}
"""Options of sbatch that `--param`, the nodes of a GPU or the cluster give."""


def _whole_amounts(amounts: dict[str, str]) -> dict[str, str]:
    """Return amounts of resources. Raises ValueError for those of which the API server wants whole ones."""
    for name, amount in amounts.items():
        if re.fullmatch(GPUS, name):
            raise ValueError(f"{name}: leave it out; a worker asks for all GPUs of its node by itself")
        if ("/" in name or name.startswith("hugepages-")) and not COUNT.fits(amount):
            raise ValueError(f"{name}: must be {COUNT.words}")
    return amounts


COLLECTIVES = get_args(Collective)
CONDITIONS = (
    "arch", "capability", "cluster", "container", "fabric", "gpu", "mnnvl", "nccl", "network", "nodes", "nvls",
    "plugin", "profile", "rack-nvlink", "racks", "scheduler", "stack", "test",
)  # fmt: skip
"""Names that a condition (`when`) can use, besides features and collectives, which are `yes` or `no`."""

# What every kind of file can contain


class Support(Model):
    """A condition under which something works or does not work, and the reason."""

    when: Condition
    reason: str


class Env(Model):
    """Set a variable of the environment."""

    name: Variable
    value: Value | None = None
    """The text; `{interface}`, `{hca}`, `{cards}` and `{gpus}` in it are replaced. Without it, ranks get the value that
    the launcher has."""
    scope: Scope = "rank"
    """Where the variable is set: in the process of every `rank`; in the environment of the `container` before it
    starts; in the `launcher`, which runs mpirun; or in the `batch` script of Slurm."""
    why: Text
    """The reason, in one line. It becomes the comment beside the variable."""
    when: Condition = Field(default_factory=dict)
    """The variable is set only where this holds, for example `nccl: "<2.27"`, `scheduler: slurm` or `mnnvl: "yes"`."""
    prepend: bool = False
    """The value is a folder that is put before the folders that the rank's variable has already."""


class Expect(Model):
    """Require a line in the output, because NCCL continues without a feature that it cannot use."""

    line: Text
    """Extended regular expression, as `grep -E` reads it."""
    why: Text
    when: Condition = Field(default_factory=dict)


class FactLayer(Model):
    """Add variables and expected lines, as every kind of file can."""

    env: tuple[Env, ...] = ()
    expect: tuple[Expect, ...] = ()


class Volume(Model):
    """Mount a folder or device of the host, or a claim, into the benchmark's container."""

    name: Label
    host: Folder | None = None
    claim: DomainName | None = None
    """Name of a PersistentVolumeClaim, instead of `host`."""
    mount: Folder
    type: HostType | None = None
    """What Kubernetes must find at `host`."""
    read_only: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.host is None) == (self.claim is None):
            raise ValueError("needs either host or claim")
        return self


class Sidecar(Model):
    """Describe a container that runs beside the benchmark's container in every worker."""

    name: Label
    image: Text
    command: tuple[Text, ...]
    env: dict[Variable, Text] = Field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    resources: Annotated[dict[Resource, Quantity], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Resource → its amount, which is both request and limit; a namespace with a quota demands `cpu` and `memory`."""
    mounts: dict[Label, Folder] = Field(default_factory=dict)
    """Name of a volume → path where it is mounted."""
    volumes: tuple[Volume, ...] = ()


class CardNetworks(Model):
    """Name networks of Google's clusters: one for each card of the node, with numbers that go up."""

    prefix: Annotated[str, Form(r"[a-z][-a-z0-9]*", "the beginning of names of Kubernetes: a-z, 0-9 and -")]
    """The network of the first card is this with `first` behind it, such as `rdma-0`."""
    first: Annotated[int, Field(ge=0)]
    interface: Annotated[int, Field(gt=0)]
    """Number of the interface of the first card in the pod: 2 is `eth2`."""


class Pod(Model):
    """Hold the resources, networks, volumes and sidecars that a worker pod needs to use a fabric."""

    resources: Annotated[dict[Resource, Count], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Resource → its amount, which is both request and limit. `cpu` and `memory` of a cluster's nodes go first."""
    annotations: dict[Key, str] = Field(default_factory=dict)
    networks: tuple[Annotated[str, Form(rf"({LABEL}/)?{DOMAIN}", "NAMESPACE/NAME or NAME")], ...] = ()
    """Networks of Multus, as `namespace/name`, or as `name` in the namespace of the job."""
    card_networks: CardNetworks | None = None
    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Label of a node → the values that are accepted."""
    volumes: tuple[Volume, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()


# The kinds of files


class Stack(FactLayer):
    """Describe the contents of an image; a file of `stacks/`."""

    title: str
    images: tuple[str, ...] = ()
    """Globs of image references. An image has the first stack with a glob that matches; an image of the plan is
    recognised by its components instead."""
    components: tuple[str, ...] = ()
    """An image of the plan with all these components has this stack."""
    prefer: int = 0
    """Of the images that fit, those whose stack has the highest number are chosen."""
    programs: Text = "/opt/nccl_tests/build"
    """Folder of nccl-tests."""
    suffix: Text = ""
    """Text after the name of each program."""
    plugins: dict[str, Text] | None = None
    """Network plug-in of NCCL → its folder, empty where the loader finds it. None: the plug-ins are not known."""
    optional_plugins: dict[str, Text] = Field(default_factory=dict)
    """Those of the plug-ins that only some images have → the component that brings them."""

    def lacks_plugin(self, plugin: str, components: Collection[str]) -> bool:
        """Return whether an image of this stack, with these components, is known not to have a plug-in."""
        component = self.optional_plugins.get(plugin)
        return self.plugins is not None and (
            plugin not in self.plugins or (component is not None and component not in components)
        )


class Fabric(FactLayer):
    """Describe a network between nodes; a file of `fabrics/`."""

    title: str
    short: str
    """The fabric in names of jobs."""
    plugin: str
    """Network plug-in of NCCL; `none` is NCCL's own transport, `host` is the plug-in that `setup` chooses."""
    measures: tuple[str, ...]
    """Kinds of network, as in profiles. Only a profile with one of them says how fast this fabric must be."""
    default_for: tuple[str, ...] = ()
    """Profiles, and kinds of network, whose jobs have this fabric if none is named; a profile goes first."""
    setup: Text | None = None
    """Shell command in which the owner of the node prepares the rank's environment; it runs before facts are set."""
    pod: Pod = Pod()
    mounts: tuple[Text, ...] = ()
    """Folders of the host, as `FROM:TO`, that pyxis mounts."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class Feature(FactLayer):
    """Describe something that a job can do in addition; a file of `features/`."""

    title: str
    plugin: str | None = None
    """Network plug-in of NCCL, instead of the fabric's."""
    claims: bool = False
    """A ComputeDomain gives containers their channel of the rack-wide NVLink."""
    without_fabric: bool = False
    """Containers get no network card."""
    in_name: bool = True
    """The feature is part of the job's name."""
    comparable: bool = True
    """The profile's limits and references are valid for jobs with this feature, too."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class SlurmOptions(Model):
    """Hold options of sbatch. Those of `--param` go first, then those of a GPU's nodes, then those of the cluster."""

    account: Annotated[str, SLURM_FORMS["account"]] | None = None
    partition: Annotated[str, SLURM_FORMS["partition"]] | None = None
    qos: Annotated[str, SLURM_FORMS["qos"]] | None = None
    reservation: Annotated[str, SLURM_FORMS["reservation"]] | None = None
    constraint: Annotated[str, SLURM_FORMS["constraint"]] | None = None
    gres: Annotated[str, SLURM_FORMS["gres"]] | None = None
    """Generic resources of each node, such as `gpu:h100:8`, where the cluster does not take `--gpus-per-node`."""
    nodelist: Annotated[str, SLURM_FORMS["nodelist"]] | None = None
    exclude: Annotated[str, SLURM_FORMS["exclude"]] | None = None


class Nodes(SlurmOptions):
    """Describe the nodes of a cluster that have one kind of GPU."""

    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Label of a node → the values that are accepted."""
    cpu: Annotated[str, CPUS] | None = None
    memory: Quantity | None = None
    rack_nodes: Annotated[int, Field(gt=0)] | None = None
    """Number of nodes in a rack that a job may use, if not all of them."""


class ClusterFabric(FactLayer):
    """Add what one cluster needs for one fabric; a value of `fabrics` in a cluster's file."""

    pod: Pod = Pod()
    plugin: str | None = None
    """Network plug-in of NCCL, instead of the fabric's."""
    mounts: tuple[Text, ...] = ()


class Toleration(Model):
    """Tolerate a taint of nodes."""

    key: Key | None = None
    """Without a key, all taints are tolerated."""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="after")
    def _value_is_compared(self) -> Self:
        if (self.operator == "Equal") == (self.value is None) or (self.operator == "Equal" and self.key is None):
            raise ValueError("operator Equal needs a key and a value, and Exists takes no value")
        return self


class Security(Model):
    """Say what the benchmark's container may do on a node, and as whom it runs."""

    privileged: bool | None = None
    user: Annotated[int, Field(ge=0, le=0)] | None = None
    """Root, or what the image says: ssh starts ranks as root, which another user's sshd refuses."""
    group: Annotated[int, Field(ge=0)] | None = None
    capabilities: tuple[Annotated[str, Form("[A-Z_]+", "a capability such as SYS_PTRACE")], ...] = ()
    """Capabilities besides the one to pin memory."""
    seccomp: Literal["RuntimeDefault", "Unconfined"] | None = None


class LauncherPod(Model):
    """Describe the pod that starts the ranks; it needs no GPU."""

    select: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of the nodes on which launchers run."""
    cpu: Annotated[str, CPUS] | None = None
    """By default 2, and one more for every 16 pairs of nodes that are measured at once."""
    memory: Quantity | None = None
    """By default 2Gi, and 64Mi more for every pair of nodes that is measured at once."""


GANGS_OF_PODS = ("volcano", "coscheduling")
"""Values of `gang` that group pods in a PodGroup. Kueue groups them by itself."""


class Kubernetes(Model):
    """Hold what an admin of Kubernetes says about the pods of jobs."""

    namespace: Label | None = None
    labels: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of the job itself."""
    annotations: dict[Key, str] = Field(default_factory=dict)
    pod_labels: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of all pods."""
    pod_annotations: dict[Key, str] = Field(default_factory=dict)
    image_pull_secrets: tuple[DomainName, ...] = ()
    service_account: DomainName | None = None
    priority_class: DomainName | None = None
    runtime_class: DomainName | None = None
    """How workers run, such as `nvidia`."""
    scheduler: DomainName | None = None
    """Name of the scheduler that places the pods."""
    gang: Literal["kueue", "volcano", "coscheduling"] | None = None
    """What starts a job only when all of its pods have a place."""
    queue: Label | None = None
    """Queue of Kueue or Volcano."""
    kueue_topology: bool = False
    """Kueue has a Topology with `rack-key` as a level, and places jobs by racks."""
    quota: bool = False
    """The namespace has a ResourceQuota: every container must say its cpu and memory."""
    host_network: bool = False
    """Workers use the network of their node."""
    ipc_lock: bool = True
    """Workers request the capability to pin memory; not needed where containers have an unlimited memlock."""
    security: Security = Security()
    shm_size: Quantity | None = None
    """Size of /dev/shm; by default half of the node's memory."""
    volumes: tuple[Volume, ...] = ()
    """What workers mount in addition."""
    tolerations: tuple[Toleration, ...] = ()
    launcher: LauncherPod = LauncherPod()
    start_minutes: Annotated[int, Field(gt=0)] = 30
    """Minutes in which all workers must have started; after that a job gives up and frees its GPUs."""
    keep_minutes: Annotated[int, Field(gt=0)] = 1440
    """Minutes after its end until Kubernetes deletes a job and its log."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        queue, scheduler = self.queue, self.scheduler
        own = next(filter(OPERATORS_LABEL.fullmatch, self.pod_labels), None)
        mistakes = {
            "queue: say with `gang` whose queue it is: kueue or volcano": queue and not self.gang,
            "gang: Kueue takes only jobs with a `queue`": self.gang == "kueue" and not queue,
            "queue: the coscheduling plug-in has no queues": self.gang == "coscheduling" and queue,
            "gang: name the `scheduler` of the coscheduling plug-in": self.gang == "coscheduling" and not scheduler,
            "scheduler: Volcano places its gangs itself": self.gang == "volcano" and scheduler not in (None, "volcano"),
            "kueue-topology: needs `gang: kueue`": self.kueue_topology and self.gang != "kueue",
            f"pod-labels: {own} is the operator's own label, by which it finds its pods; leave it out": own,
        }
        if problem := next((problem for problem, is_so in mistakes.items() if is_so), None):
            raise ValueError(problem)
        return self


class Slurm(SlurmOptions):
    """Hold what an admin of Slurm says about jobs."""

    cpus_per_task: Annotated[int, Field(gt=0, le=9999)] = 8
    """CPUs of a rank."""
    module: Annotated[str, MODULES] | None = None
    """Environment modules, with blanks between them, that jobs without a container load in this order."""
    images: Annotated[str, Form(r"[/$][^\n\r\x00]*", "a path that begins with / or with a variable")] = (
        "$HOME/.cache/imagebuild"
    )
    """Folder, shared by all nodes, for images that pyxis starts; it may contain variables of the shell."""
    before: Text | None = None
    """Shell command that the batch script runs first; it ends the job if it fails."""
    task_prolog: Folder | None = None
    """Program that srun runs before each rank."""
    task_epilog: Folder | None = None


class Cluster(FactLayer):
    """Hold everything in which this cluster differs from others; a file of `clusters/`."""

    title: str
    registry: Annotated[str, REGISTRY] | None = None
    """Registry and folder from which nodes pull the plan's images, such as `ghcr.io/acme`."""
    interface: Text = "eth0"
    """Network interface through which ranks find each other."""
    hca: Text = "mlx5"
    """RDMA devices, as NCCL_IB_HCA takes them: the beginning of their names, or `=` and a list."""
    driver: Text | None = None
    """Version of the driver on the nodes; images that need a newer one are not chosen."""
    rack_key: Key = "nvidia.com/gpu.clique"
    """Label of nodes that shows which of them share a rack-wide NVLink."""
    fabrics: dict[str, ClusterFabric] = Field(default_factory=dict)
    nodes: dict[Gpu, Nodes] = Field(default_factory=dict)
    """GPU, as in names of jobs (`h100`) → its nodes."""
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()


class JobTest(Model):
    """Name the collectives and message sizes to measure; a file of `tests/`."""

    title: str
    collectives: Annotated[tuple[Collective, ...], Field(min_length=1)]
    min_bytes: Bytes
    max_bytes: Bytes
    factor: Text = "2"
    iterations: Text | None = None
    warmup: Text | None = None
    check: bool = True
    """The programs compare the data with what they should be."""
    pairs: bool = False
    """Every pair of nodes is measured by itself: in rounds, in which each node is in one pair."""
    minutes: Annotated[int, Field(gt=0)] = 20
    """Time limit in minutes: of the test, or of each round where pairs are measured."""


class NodeFacts(FactLayer):
    """The variables that every node needs; the file `node.yaml`."""

    title: str


class KubernetesScheduler(Model):
    """How a scheduler runs jobs on Kubernetes."""

    resource: Label
    """Name of its resource for kubectl, such as `mpijob`."""
    job_label: Key
    """Label of a pod with the name of its job."""
    role_label: Key
    """Label of a pod with its role: `launcher` or `worker`."""
    mpi_operator: bool
    """An operator makes the hostfile, the keys for ssh and the group of the pods. Without it, the job makes them."""
    exclusive_racks: bool
    """The workers of each rack can be a job of their own, on a rack that no other job uses."""


class SchedulerFacts(FactLayer):
    """What starts the ranks of a job; a file of `schedulers/`."""

    title: str
    containers: Annotated[tuple[Container, ...], Field(min_length=1)]
    """What can run the ranks. The first one is the default."""
    longest_name: Annotated[int, Field(gt=0)]
    """Maximum number of characters in the name of a job."""
    kubernetes: KubernetesScheduler | None = None
    """Absent for Slurm."""


class NcclVariables(Model):
    """Hold the file `nccl-params.json`: the variables that the newest known release of NCCL reads."""

    release: str
    names: frozenset[str]


@dataclass(frozen=True)
class JobFacts:
    """Hold everything that the folder `jobs/` contains."""

    stacks: Mapping[str, YamlFile[Stack]]
    fabrics: Mapping[str, YamlFile[Fabric]]
    features: Mapping[str, YamlFile[Feature]]
    clusters: Mapping[str, YamlFile[Cluster]]
    tests: Mapping[str, YamlFile[JobTest]]
    schedulers: Mapping[str, YamlFile[SchedulerFacts]]
    node: YamlFile[NodeFacts]
    nccl_variables: NcclVariables


M = TypeVar("M", bound=Model)
KINDS: Mapping[str, type[Model]] = {
    "stacks": Stack, "fabrics": Fabric, "features": Feature, "clusters": Cluster, "tests": JobTest,
    "schedulers": SchedulerFacts,
}  # fmt: skip
"""Folder → what its files describe."""


def load_facts(*folders: Path) -> JobFacts:
    """Read all facts of folders; of one name, the last folder's.

    Raises ConfigError with every mistake found, each with its file and line.
    """
    mistakes = Mistakes()
    paths = {path.relative_to(folder).as_posix(): path for folder in folders for path in sorted(folder.rglob("*.*"))}

    def load(name: str, model: type[M]) -> YamlFile[M] | None:
        return load_yaml(paths.get(name, folders[-1] / name), model, mistakes)

    kinds: dict[str, Mapping[str, YamlFile[Any]]] = {}
    for kind, model in KINDS.items():
        files = {PurePath(name).stem: load(name, model) for name in paths if PurePath(name).match(f"{kind}/*.yaml")}
        if not files:
            where = str(folders[-1] / kind)
            mistakes.add(where, "no *.yaml in this folder; name the folder that contains the facts with --facts")
        kinds[kind] = {name: file for name, file in files.items() if file}
    node, nccl_variables = load("node.yaml", NodeFacts), load("nccl-params.json", NcclVariables)
    fabrics = kinds["fabrics"]
    for cluster in kinds["clusters"].values():
        for name in set(cluster.model.fabrics) - set(fabrics):
            mistakes.add(cluster.at("fabrics", name), f"fabrics.{name}: unknown fabric{suggestion(name, set(fabrics))}")
        _check_volumes(cluster, fabrics, mistakes)
    # A condition on an unknown name would never hold, and nobody would notice.
    known = {*CONDITIONS, *COLLECTIVES, *kinds["features"]}
    for file in chain(filter(None, [node]), *(files.values() for files in kinds.values())):
        for loc in file.lines:
            if loc[-2:-1] == ("when",) and loc[-1] not in known:
                mistakes.add(file.at(*loc), f"{dotted_key(loc)}: unknown fact{suggestion(str(loc[-1]), known)}")
    mistakes.stop_if_any()
    assert node
    assert nccl_variables
    return JobFacts(**kinds, node=node, nccl_variables=nccl_variables.model)


def find_facts(files: Mapping[str, YamlFile[M]], noun: str, name: str) -> M:
    """Return the facts of a name. Raises ConfigError with the most similar name if there are none."""
    if name not in files:
        raise ConfigError(f"--{noun} {name}: unknown {noun}{suggestion(name, files)}")
    return files[name].model


def fill_placeholders(text: str, placeholders: Mapping[str, str], where: str) -> str:
    """Replace `{name}` by its value. Raises ConfigError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in placeholders:
            known = ", ".join(sorted(placeholders))
            raise ConfigError(f"{where}: unknown placeholder {{{match[1]}}}; known: {known}")
        return placeholders[match[1]]

    return re.sub(r"(?<!\$){([a-z][a-z0-9-]*)}", value, text)


def _check_volumes(cluster: YamlFile[Cluster], fabrics: Mapping[str, YamlFile[Fabric]], mistakes: Mistakes) -> None:
    """Add a mistake for each volume of a cluster whose name or path another one in the same pod has."""
    for name, fabric in fabrics.items():
        pod, site = fabric.model.pod, cluster.model.fabrics.get(name, ClusterFabric()).pod
        taken = {"dshm", "/dev/shm", *(volume.name for sidecar in pod.sidecars for volume in sidecar.volumes)}  # noqa: S108
        taken |= {text for volume in pod.volumes for text in (volume.name, volume.mount)}
        own: dict[Loc, Volume] = {
            ("kubernetes", "volumes", i): v for i, v in enumerate(cluster.model.kubernetes.volumes)
        }
        own |= {("fabrics", name, "pod", "volumes", i): v for i, v in enumerate(site.volumes)}
        for key, volume in own.items():
            if taken & {volume.name, volume.mount}:
                mistakes.add(cluster.at(*key), f"{dotted_key(key)}: another volume of the pod has this name or path")
            taken |= {volume.name, volume.mount}


def default_fabric(profile: Profile, fabrics: Mapping[str, YamlFile[Fabric]]) -> str:
    """Return the fabric of a job without --fabric: the profile's own, or the one for its cards."""
    wanted = (profile.name, profile.network.kind if profile.network else "none")
    fits = (name for want in wanted for name, fabric in fabrics.items() if want in fabric.model.default_for)
    return next(fits, "ethernet")


@dataclass(frozen=True)
class JobRequest:
    """Hold the arguments of `imagebuild job`."""

    words: tuple[str, ...]
    """All of them as they were typed."""
    scheduler: Scheduler
    profile: str
    fabric: str
    cluster: str = "generic"
    nodes: int | None = None
    racks: int | None = None
    features: tuple[str, ...] = ()
    components: tuple[str, ...] = ()
    container: Literal["pyxis", "none"] | None = None
    image: str | None = None
    nccl: str | None = None
    test: str = "all-reduce"
    settings: tuple[str, ...] = ()
    """Texts of `--param`: `NAME=VALUE`, `scope:NAME=VALUE` or `NAME:=VALUE`."""
    collect: bool = False
    profiles: str | None = None
