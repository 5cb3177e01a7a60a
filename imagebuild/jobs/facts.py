"""The types of the facts about jobs, which are the files in the folder `jobs/`."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator

from imagebuild.bench.models import Collective
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import Condition, Form, Model, Variable, YamlFile

Container = Literal["kubernetes", "pyxis", "none"]
"""How ranks run: in a container of Kubernetes or of pyxis, or with `none` as plain processes of the node."""
Scope = Literal["rank", "container", "launcher", "batch"]
"""Where a variable is set, as in `Env.scope`."""

Text = Annotated[str, Form(r"[^\n\r\x00]*", "one line")]
# A shell or a file on the way to the rank would interpret quotes and backslashes.
VALUE_FORM = Form(r"""[^'"`\\\x00-\x1f\x7f]*""", "one line without quotes and backslashes")
Value = Annotated[str, VALUE_FORM]
Bytes = Annotated[str, Form("[1-9][0-9]*[KMG]?", "a size for nccl-tests such as 512M")]

# Texts that the API server of Kubernetes accepts
LABEL = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"
DOMAIN = r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
VALUE = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
GPUS = r"nvidia\.com/(gpu|mig-.*)"
QUALIFIED = f"{DOMAIN.replace('$', '/')}/{VALUE}"
AMOUNT = r"(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?([KMGTPE]i|[mkMGTPE]|[eE][0-9]+)?"
OPERATORS_LABEL = re.compile(
    r"(training\.kubeflow\.org|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io)/.*|job-name|controller-uid"
)
QUANTITY = Form(AMOUNT, "a Kubernetes quantity such as 110, 500m, 960Gi or 960G")
Label = Annotated[str, Form(LABEL, "a Kubernetes name: up to 63 of a-z, 0-9 and -")]
DomainName = Annotated[str, Form(DOMAIN, "a Kubernetes name: a-z, 0-9, - and dots")]
Key = Annotated[str, Form(f"{QUALIFIED}|{VALUE}", "a Kubernetes key such as example.com/name")]
LabelValue = Annotated[str, Form(f"({VALUE})?", "a label value: up to 63 of A-Z, a-z, 0-9, -, _ and .")]
Quantity = Annotated[str, QUANTITY]
CPUS = Form(r"(?=[0-9.]*[1-9])([0-9]{1,4}(\.[0-9]{1,3})?|[0-9]{1,7}m)", "a number of CPUs such as 110, 2.5 or 500m")
COUNT = Form(r"[1-9][0-9]*([kMGTPE]|[KMGTPE]i)?|\{[a-z]+\}", "a number, such as 8 or 5120Mi, or {cards}")
Count = Annotated[str, COUNT]
Folder = Annotated[str, Form(r"(?!.*/\.\.(/|$))/[^\n\r\x00:]*", "a path that begins with / and has no colon and no ..")]
Resource = Annotated[str, Form(f"cpu|memory|hugepages-{AMOUNT}|{QUALIFIED}", "a resource such as rdma/ib or cpu")]
Gpu = Annotated[str, Form(r"[a-z]{1,3}[0-9]{2,4}", "the short name of a GPU such as h100")]
HostType = Literal["Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice"]

REGISTRY = Form(r"[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[a-z0-9._-]+)*", "a registry and folder such as ghcr.io/acme")

# Texts that sbatch accepts
NAME = "[A-Za-z0-9_][A-Za-z0-9_.@+-]*"
RESOURCE = r"[A-Za-z_]\w*(:[0-9]*[A-Za-z_][\w.+-]*)?(:[1-9][0-9]*[kKmMgGtT]?)?"
HOSTS = r"[A-Za-z0-9_][\w.-]*(\[[0-9]+(-[0-9]+)?(,[0-9]+(-[0-9]+)?)*\][\w.-]*)*"
MODULE = "[A-Za-z0-9._/][A-Za-z0-9._/+-]*"
MODULES = Form(f"{MODULE}( +{MODULE})*", "names of modules such as openmpi/5, separated by blanks")
SLURM_FORMS = {
    "account": Form(NAME, "a name without blanks"),
    **dict.fromkeys(("partition", "qos", "reservation"), Form(f"{NAME}(,{NAME})*", "names separated by commas")),
    "constraint": Form(r"[A-Za-z0-9_([][A-Za-z0-9_.,=:&|*()\[\]/-]*", "node features in the syntax of sbatch"),
    "gres": Form(f"{RESOURCE}(,{RESOURCE})*", "resources of a node such as gpu:8 or gpu:h100:8"),
    **dict.fromkeys(("nodelist", "exclude"), Form(f"{HOSTS}(,{HOSTS})*", "node names such as node[01-04],node9")),
}
"""Options of sbatch that `--param`, the nodes of a GPU or the cluster can set."""


def _whole_amounts(amounts: dict[str, str]) -> dict[str, str]:
    """Return amounts of resources. Raises ValueError for a fraction if the API server accepts only whole amounts."""
    for name, amount in amounts.items():
        if re.fullmatch(GPUS, name):
            raise ValueError(f"{name}: remove it; a worker always requests all GPUs of its node")
        if ("/" in name or name.startswith("hugepages-")) and not COUNT.fits(amount):
            raise ValueError(f"{name}: must be {COUNT.words}")
    return amounts


COLLECTIVES = get_args(Collective)
CONDITIONS = (
    "arch", "capability", "cluster", "container", "fabric", "gpu", "mnnvl", "nccl", "network", "nodes", "nvls",
    "plugin", "profile", "rack-nvlink", "racks", "scheduler", "stack", "test",
)  # fmt: skip
"""Names that a condition (`when`) can use. It can also use features and collectives, which are `yes` or `no`."""

# What every kind of file can contain


class Support(Model):
    """A condition under which something works or does not work, and the reason."""

    when: Condition
    reason: str


class Env(Model):
    """A variable of the environment."""

    name: Variable
    value: Value | None = None
    """The value. `{interface}`, `{hca}`, `{cards}` (number of NICs) and `{gpus}` in it are replaced. Default: the value
    that the launcher has."""
    scope: Scope = "rank"
    """Place where the variable is set: in the process of every `rank`, in the environment of the `container` before it
    starts, in the `launcher`, which runs mpirun, or in the `batch` script of Slurm."""
    why: Text
    """The reason, in one line. It becomes a comment above the variable."""
    when: Condition = Field(default_factory=dict)
    """Condition for setting the variable, for example `nccl: "<2.27"`, `scheduler: slurm` or `mnnvl: "yes"`."""
    prepend: bool = False
    """The value is a folder. It is put before the folders that the variable already contains."""


class Expect(Model):
    """A line that the output must contain, because NCCL silently continues without a feature that it cannot use."""

    line: Text
    """Extended regular expression for `grep -E`."""
    why: Text
    when: Condition = Field(default_factory=dict)


class FactLayer(Model):
    """Variables and expected lines, which every kind of file can contain."""

    env: tuple[Env, ...] = ()
    expect: tuple[Expect, ...] = ()


class Volume(Model):
    """A folder or device of the host, or a claim, that is mounted into the benchmark's container."""

    name: Label
    host: Folder | None = None
    claim: DomainName | None = None
    """Name of a PersistentVolumeClaim, instead of `host`."""
    mount: Folder
    type: HostType | None = None
    """Kind of file that Kubernetes must find at `host`."""
    read_only: bool = False

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.host is None) == (self.claim is None):
            raise ValueError("write either host or claim")
        return self


class Sidecar(Model):
    """A container that runs beside the benchmark's container in every worker."""

    name: Label
    image: Text
    command: tuple[Text, ...]
    env: dict[Variable, Text] = Field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    resources: Annotated[dict[Resource, Quantity], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Maps each resource to its amount, which is both request and limit. A namespace with a quota needs `cpu` and
    `memory`."""
    mounts: dict[Label, Folder] = Field(default_factory=dict)
    """Maps each volume to the path where it is mounted."""
    volumes: tuple[Volume, ...] = ()


class CardNetworks(Model):
    """The networks of a Google cluster: one for each NIC of the node, with consecutive numbers."""

    prefix: Annotated[str, Form(r"[a-z][-a-z0-9]*", "the beginning of Kubernetes names: a-z, 0-9 and -")]
    """The network of the first NIC has this name, followed by `first`, for example `rdma-0`."""
    first: Annotated[int, Field(ge=0)]
    interface: Annotated[int, Field(gt=0)]
    """Number of the first NIC's interface in the pod: 2 means `eth2`."""


class Pod(Model):
    """The resources, networks, volumes and sidecars that a worker pod needs to use a fabric."""

    resources: Annotated[dict[Resource, Count], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Maps each resource to its amount, which is both request and limit. `cpu` and `memory` of a cluster's nodes have
    precedence."""
    annotations: dict[Key, str] = Field(default_factory=dict)
    networks: tuple[Annotated[str, Form(rf"({LABEL}/)?{DOMAIN}", "NAMESPACE/NAME or NAME")], ...] = ()
    """Networks of Multus: `namespace/name`, or `name` for a network in the namespace of the job."""
    card_networks: CardNetworks | None = None
    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Maps each label of a node to its accepted values."""
    volumes: tuple[Volume, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()


# The kinds of files


class Stack(FactLayer):
    """The contents of an image; a file in `stacks/`."""

    title: str
    images: tuple[str, ...] = ()
    """Globs of image references. An image has the first stack with a matching glob. An image of a plan is recognised by
    its components instead."""
    components: tuple[str, ...] = ()
    """Components by which an image of a plan is recognised. It must contain all of them."""
    prefer: int = 0
    """Among the images that fit, a job chooses those whose stack has the highest number."""
    programs: Text = "/opt/nccl_tests/build"
    """Folder of nccl-tests."""
    suffix: Text = ""
    """Text after the name of each program."""
    plugins: dict[str, Text] | None = None
    """Maps each network plug-in of NCCL to its folder. Empty if the loader finds the plug-in without help. None if the
    plug-ins are not known."""
    optional_plugins: dict[str, Text] = Field(default_factory=dict)
    """Maps each plug-in that only some images contain to the component that installs it."""

    def lacks_plugin(self, plugin: str, components: Collection[str]) -> bool:
        """Return whether an image with this stack and these components is known to lack a plug-in."""
        component = self.optional_plugins.get(plugin)
        return self.plugins is not None and (
            plugin not in self.plugins or (component is not None and component not in components)
        )


class Fabric(FactLayer):
    """A network between nodes; a file in `fabrics/`."""

    title: str
    short: str
    """Short name of the fabric, used in the names of jobs."""
    plugin: str
    """Network plug-in of NCCL. `none` is NCCL's own transport. `host` is the plug-in that `setup` chooses."""
    measures: tuple[str, ...]
    """Kinds of network, as in profiles. Only a profile with one of these kinds can judge the speed of this fabric."""
    default_for: tuple[str, ...] = ()
    """Profiles and kinds of network whose jobs use this fabric if none is named. Profiles have precedence."""
    setup: Text | None = None
    """Shell command, installed by the owner of the node, that prepares the environment of each rank. It runs before the
    variables of the facts are set."""
    pod: Pod = Pod()
    mounts: tuple[Text, ...] = ()
    """Folders of the host that pyxis mounts, written as `FROM:TO`."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class Feature(FactLayer):
    """An additional setting of a job; a file in `features/`."""

    title: str
    plugin: str | None = None
    """Network plug-in of NCCL. Default: the plug-in of the fabric."""
    claims: bool = False
    """A ComputeDomain gives each container a channel to the NVLink of the rack."""
    without_fabric: bool = False
    """Containers get no NIC."""
    in_name: bool = True
    """The feature is part of the job's name."""
    comparable: bool = True
    """The profile's limits and references are also valid for jobs with this feature."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class SlurmOptions(Model):
    """Options of sbatch. `--param` has precedence over the nodes of a GPU, and these over the cluster."""

    account: Annotated[str, SLURM_FORMS["account"]] | None = None
    partition: Annotated[str, SLURM_FORMS["partition"]] | None = None
    qos: Annotated[str, SLURM_FORMS["qos"]] | None = None
    reservation: Annotated[str, SLURM_FORMS["reservation"]] | None = None
    constraint: Annotated[str, SLURM_FORMS["constraint"]] | None = None
    gres: Annotated[str, SLURM_FORMS["gres"]] | None = None
    """Generic resources of each node, such as `gpu:h100:8`, if the cluster does not accept `--gpus-per-node`."""
    nodelist: Annotated[str, SLURM_FORMS["nodelist"]] | None = None
    exclude: Annotated[str, SLURM_FORMS["exclude"]] | None = None


class Nodes(SlurmOptions):
    """The nodes of a cluster with one kind of GPU."""

    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Maps each label of a node to its accepted values."""
    cpu: Annotated[str, CPUS] | None = None
    memory: Quantity | None = None
    rack_nodes: Annotated[int, Field(gt=0)] | None = None
    """Number of nodes in a rack that a job may use. Default: all nodes."""


class ClusterFabric(FactLayer):
    """Additions of one cluster for one fabric; a value of `fabrics` in a cluster's file."""

    pod: Pod = Pod()
    plugin: str | None = None
    """Network plug-in of NCCL. Default: the plug-in of the fabric."""
    mounts: tuple[Text, ...] = ()


class Toleration(Model):
    """A taint of nodes that the pods tolerate."""

    key: Key | None = None
    """Key of the taint. Without a key, all taints are tolerated."""
    operator: Literal["Exists", "Equal"] = "Exists"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None

    @model_validator(mode="after")
    def _value_is_compared(self) -> Self:
        if (self.operator == "Equal") == (self.value is None) or (self.operator == "Equal" and self.key is None):
            raise ValueError("operator Equal needs a key and a value, and Exists must have no value")
        return self


class Security(Model):
    """The privileges and the user of the benchmark's container."""

    privileged: bool | None = None
    user: Annotated[int, Field(ge=0, le=0)] | None = None
    """User id. Only root (0) is allowed, because ssh starts ranks as root. Default: the user of the image."""
    group: Annotated[int, Field(ge=0)] | None = None
    capabilities: tuple[Annotated[str, Form("[A-Z_]+", "a capability such as SYS_PTRACE")], ...] = ()
    """Capabilities in addition to IPC_LOCK, which pins memory."""
    seccomp: Literal["RuntimeDefault", "Unconfined"] | None = None


class LauncherPod(Model):
    """The pod that starts the ranks. It needs no GPU."""

    select: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of the nodes on which launchers run."""
    cpu: Annotated[str, CPUS] | None = None
    """Default: 2, and one more for every 16 pairs of nodes that are measured at once."""
    memory: Quantity | None = None
    """Default: 2Gi, and 64Mi more for every pair of nodes that is measured at once."""


GANGS_OF_PODS = ("volcano", "coscheduling")
"""Values of `gang` that group pods in a PodGroup. Kueue groups them by itself."""


class Kubernetes(Model):
    """Settings of a cluster for jobs on Kubernetes."""

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
    """RuntimeClass of the workers, such as `nvidia`."""
    scheduler: DomainName | None = None
    """Name of the scheduler that places the pods."""
    gang: Literal["kueue", "volcano", "coscheduling"] | None = None
    """Gang scheduler, which starts a job only when all of its pods have a place."""
    queue: Label | None = None
    """Queue of Kueue or Volcano for the jobs."""
    kueue_topology: bool = False
    """Kueue has a Topology with `rack-key` as a level, so it can place jobs on racks."""
    quota: bool = False
    """The namespace has a ResourceQuota, so every container must request cpu and memory."""
    host_network: bool = False
    """Workers use the network of their node."""
    ipc_lock: bool = True
    """Workers request IPC_LOCK to pin memory. Not needed if containers have an unlimited memlock."""
    security: Security = Security()
    shm_size: Quantity | None = None
    """Size of /dev/shm. Default: half of the node's memory."""
    volumes: tuple[Volume, ...] = ()
    """Additional volumes of the workers."""
    tolerations: tuple[Toleration, ...] = ()
    launcher: LauncherPod = LauncherPod()
    start_minutes: Annotated[int, Field(gt=0)] = 30
    """Minutes for all workers to start. After that, the job fails and frees its GPUs."""
    keep_minutes: Annotated[int, Field(gt=0)] = 1440
    """Minutes from the end of a job until Kubernetes deletes it and its log."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        queue, scheduler = self.queue, self.scheduler
        own = next(filter(OPERATORS_LABEL.fullmatch, self.pod_labels), None)
        mistakes = {
            "queue: add `gang: kueue` or `gang: volcano`": queue and not self.gang,
            "gang: Kueue needs a `queue`; add one": self.gang == "kueue" and not queue,
            "queue: the coscheduling plug-in has no queues; remove it": self.gang == "coscheduling" and queue,
            "gang: coscheduling needs the name of its `scheduler`; add it": self.gang == "coscheduling"
            and not scheduler,
            "scheduler: Volcano schedules its gangs itself; remove it": self.gang == "volcano"
            and scheduler not in (None, "volcano"),
            "kueue-topology: needs `gang: kueue`; add it": self.kueue_topology and self.gang != "kueue",
            f"pod-labels: {own} is a label by which the operator finds its pods; remove it": own,
        }
        if problem := next((problem for problem, is_so in mistakes.items() if is_so), None):
            raise ValueError(problem)
        return self


class Slurm(SlurmOptions):
    """Settings of a cluster for jobs on Slurm."""

    cpus_per_task: Annotated[int, Field(gt=0, le=9999)] = 8
    """CPUs for each rank."""
    module: Annotated[str, MODULES] | None = None
    """Environment modules that jobs without a container load, in this order and separated by blanks."""
    images: Annotated[str, Form(r"[/$][^\n\r\x00]*", "a path that begins with / or with a variable")] = (
        "$HOME/.cache/imagebuild"
    )
    """Folder for the images that pyxis starts. All nodes must share it. It may contain shell variables."""
    before: Text | None = None
    """Shell command that the batch script runs first. If the command fails, the job ends."""
    task_prolog: Folder | None = None
    """Program that srun runs before each rank."""
    task_epilog: Folder | None = None


class Cluster(FactLayer):
    """The differences of one cluster from others; a file in `clusters/`."""

    title: str
    registry: Annotated[str, REGISTRY] | None = None
    """Registry and folder from which nodes pull the planned images, such as `ghcr.io/acme`."""
    interface: Text = "eth0"
    """Network interface through which ranks find each other."""
    hca: Text = "mlx5"
    """RDMA devices in the syntax of NCCL_IB_HCA: a prefix of their names, or `=` and a list of names."""
    driver: Text | None = None
    """Driver version on the nodes. A job does not choose images that need a newer driver."""
    rack_key: Key = "nvidia.com/gpu.clique"
    """Label whose value nodes share if NVLink connects them as a rack."""
    fabrics: dict[str, ClusterFabric] = Field(default_factory=dict)
    nodes: dict[Gpu, Nodes] = Field(default_factory=dict)
    """Maps the short name of a GPU, such as `h100`, to its nodes."""
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()


class JobTest(Model):
    """The collectives and message sizes that a job measures; a file in `tests/`."""

    title: str
    collectives: Annotated[tuple[Collective, ...], Field(min_length=1)]
    min_bytes: Bytes
    max_bytes: Bytes
    factor: Text = "2"
    iterations: Text | None = None
    warmup: Text | None = None
    check: bool = True
    """The programs check that the data are right."""
    pairs: bool = False
    """Every pair of nodes is measured separately. In each round, every node is in one pair."""
    minutes: Annotated[int, Field(gt=0)] = 20
    """Time limit in minutes for the test, or for each round if pairs are measured."""


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
    """A program that starts jobs; a file in `schedulers/`."""

    title: str
    containers: Annotated[tuple[Container, ...], Field(min_length=1)]
    """How ranks can run. The first value is the default."""
    longest_name: Annotated[int, Field(gt=0)]
    """Maximum number of characters in the name of a job."""
    kubernetes: KubernetesScheduler | None = None
    """Absent for Slurm."""


class NcclVariables(Model):
    """The variables that the newest known release of NCCL reads; the file `nccl-params.json`."""

    release: str
    names: frozenset[str]


@dataclass(frozen=True)
class JobFacts:
    """The contents of the folder `jobs/`."""

    stacks: Mapping[str, YamlFile[Stack]]
    fabrics: Mapping[str, YamlFile[Fabric]]
    features: Mapping[str, YamlFile[Feature]]
    clusters: Mapping[str, YamlFile[Cluster]]
    tests: Mapping[str, YamlFile[JobTest]]
    schedulers: Mapping[str, YamlFile[SchedulerFacts]]
    node: YamlFile[NodeFacts]
    nccl_variables: NcclVariables


M = TypeVar("M", bound=Model)


def find_facts(files: Mapping[str, YamlFile[M]], noun: str, name: str) -> M:
    """Return the facts with this name. If there are none, raises ConfigError with the most similar name."""
    if name not in files:
        raise ConfigError(f"--{noun} {name}: unknown {noun}{suggestion(name, files)}")
    return files[name].model


def fill_placeholders(text: str, placeholders: Mapping[str, str], where: str) -> str:
    """Replace each `{name}` in a text by its value. Raises ConfigError for an unknown name."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in placeholders:
            known = ", ".join(sorted(placeholders))
            raise ConfigError(f"{where}: unknown placeholder {{{match[1]}}}; known: {known}")
        return placeholders[match[1]]

    return re.sub(r"(?<!\$){([a-z][a-z0-9-]*)}", value, text)


def default_fabric(profile: Profile, fabrics: Mapping[str, YamlFile[Fabric]]) -> str:
    """Return the fabric of a job without --fabric: the one for its profile, or else the one for its NICs."""
    wanted = (profile.name, profile.network.kind if profile.network else "none")
    fits = (name for want in wanted for name, fabric in fabrics.items() if want in fabric.model.default_for)
    return next(fits, "ethernet")
