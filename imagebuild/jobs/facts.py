"""The facts, their types and their reader: the YAML files in `jobs/` that describe fabrics, clusters and tests."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import AfterValidator, Field, model_validator

from imagebuild.bench.models import Collective
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, Mistakes, suggestion
from imagebuild.core.fields import Condition, Form, Loc, Model, Support, Variable, YamlFile
from imagebuild.core.patterns import DataFile
from imagebuild.core.yaml import dotted_key, load_yaml

Container = Literal["kubernetes", "pyxis", "apptainer", "none"]
"""How ranks run: in a container on Kubernetes, in a container of pyxis or Apptainer on Slurm, or as processes of the
node (`none`)."""
Scope = Literal["rank", "container", "launcher", "batch"]
"""Place where an environment variable is set. `Env.scope` explains each place."""

DATA = DataFile(__file__)
FORMS = {name: Form(DATA.complete(row["pattern"]), row["words"]) for name, row in DATA["forms"].items()}
"""The forms of texts in facts and of the values of `--param`."""
Text = Annotated[str, FORMS["text"]]
Value = Annotated[str, FORMS["value"]]
Bytes = Annotated[str, FORMS["bytes"]]
Label = Annotated[str, FORMS["label"]]
DomainName = Annotated[str, FORMS["domain"]]
Key = Annotated[str, FORMS["key"]]
LabelValue = Annotated[str, FORMS["label-value"]]
Quantity = Annotated[str, FORMS["quantity"]]
Count = Annotated[str, FORMS["count"]]
Folder = Annotated[str, FORMS["folder"]]
Resource = Annotated[str, FORMS["resource"]]
Gpu = Annotated[str, FORMS["gpu"]]
Cpus = Annotated[str, FORMS["cpus"]]
NodeNames = Annotated[str, FORMS["nodes"]]
Names = Annotated[str, FORMS["names"]]
HostType = Literal["Directory", "DirectoryOrCreate", "File", "FileOrCreate", "Socket", "CharDevice", "BlockDevice"]


def _whole_amounts(amounts: dict[str, str]) -> dict[str, str]:
    """Return the amounts of resources unchanged.
    Raises ValueError for GPUs, and for a fraction of a resource of which the API server accepts only whole amounts."""
    for name, amount in amounts.items():
        if DATA.patterns["gpus"].fullmatch(name):
            raise ValueError(f"{name}: remove this resource; a worker always requests all GPUs of its node")
        if ("/" in name or name.startswith("hugepages-")) and not FORMS["count"].fits(amount):
            raise ValueError(f"{name}: must be {FORMS['count'].words}")
    return amounts


COLLECTIVES = get_args(Collective)
CONDITIONS: Sequence[str] = DATA["conditions"]
"""Names that a condition (`when`) can use. The names of features and collectives are also allowed; their value is `yes`
or `no`."""

# Parts of every kind of facts file


class Env(Model):
    """An environment variable of a job."""

    name: Variable
    value: Value | None = None
    """The value. The placeholders `{interface}`, `{hca}`, `{cards}` (NICs of a node) and `{gpus}` (GPUs of a node) are
    replaced. Default: the value that the launcher has."""
    scope: Scope = "rank"
    """Place where the variable is set: in the process of every `rank`, in the environment of the `container` before it
    starts, in the `launcher`, which runs mpirun, or in the `batch` script of Slurm."""
    why: Text
    """Reason for the variable, in one line. The job contains the reason as a comment above the variable."""
    when: Condition = Field(default_factory=dict)
    """Condition for setting the variable, for example `nccl: "<2.27"`, `scheduler: slurm` or `mnnvl: "yes"`."""
    prepend: bool = False
    """If true, the value is a folder that is put before the folders that the variable already contains."""


class Expect(Model):
    """A line that the output of a job must contain as proof that NCCL uses a feature.
    NCCL silently continues without a feature that NCCL cannot use."""

    line: Text
    """Extended regular expression (`grep -E`) that matches the line."""
    only: Text | None = None
    """Extended regular expression of the only texts that may match `line`. Default: any text."""
    why: Text
    when: Condition = Field(default_factory=dict)


class FactLayer(Model):
    """Environment variables and expected lines of output, which every kind of facts file can contain."""

    env: tuple[Env, ...] = ()
    expect: tuple[Expect, ...] = ()


class Volume(Model):
    """A folder or device of the host, or a PersistentVolumeClaim, that is mounted into the benchmark's container."""

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
            raise ValueError("write exactly one of host and claim")
        return self


class Sidecar(Model):
    """A container that runs beside the benchmark's container in every worker."""

    name: Label
    image: Text
    command: tuple[Text, ...]
    env: dict[Variable, Text] = Field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    resources: Annotated[dict[Resource, Quantity], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Maps each resource to the amount that is both requested and the limit. In a namespace with a quota, `cpu` and
    `memory` are required."""
    mounts: dict[Label, Folder] = Field(default_factory=dict)
    """Maps each volume to the path where it is mounted."""
    volumes: tuple[Volume, ...] = ()


class CardNetworks(Model):
    """The GKE networks of a worker pod: one for each NIC of the node, with names that end with consecutive numbers."""

    prefix: Annotated[str, FORMS["prefix"]]
    """Beginning of the networks' names. The name of the first network is `prefix` and `first`, for example `rdma-0`."""
    first: Annotated[int, Field(ge=0)]
    interface: Annotated[int, Field(gt=0)]
    """Number of the first NIC's interface in the pod: 2 means `eth2`."""


class Pod(Model):
    """The resources, networks, volumes and sidecars that a worker pod needs to use a fabric."""

    resources: Annotated[dict[Resource, Count], AfterValidator(_whole_amounts)] = Field(default_factory=dict)
    """Maps each resource to the amount that is both requested and the limit. `cpu` and `memory` under `nodes` in the
    cluster's file have precedence."""
    annotations: dict[Key, str] = Field(default_factory=dict)
    networks: tuple[Annotated[str, FORMS["network"]], ...] = ()
    """Multus networks of the pod: `namespace/name`, or `name` for a network in the namespace of the job."""
    card_networks: CardNetworks | None = None
    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Maps each label of a node to its accepted values."""
    volumes: tuple[Volume, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()


# The kinds of files


class Stack(FactLayer):
    """The NCCL programs and plug-ins that a kind of image contains; a file in `jobs/stacks/`."""

    title: str
    images: tuple[str, ...] = ()
    """Globs that match the names of images with this stack. If several stacks match a name, the first one is used.
    Images of a plan are recognised by `components` instead."""
    components: tuple[str, ...] = ()
    """An image of a plan has this stack if the image contains all of these components."""
    prefer: int = 0
    """Priority: among the images that fit, a job chooses an image whose stack has the highest number."""
    programs: Text = "/opt/nccl_tests/build"
    """Folder of the nccl-tests programs in the image."""
    suffix: Text = ""
    """Text that is appended to the name of each nccl-tests program."""
    plugins: dict[str, Value] | None = None
    """Maps each network plug-in of NCCL to the folder of the plug-in. The folder is empty if the loader finds the
    plug-in without help. None if it is not known which plug-ins the image contains."""
    optional_plugins: dict[str, Text] = Field(default_factory=dict)
    """Maps each plug-in that only some images contain to the component that installs the plug-in."""

    def lacks_plugin(self, plugin: str, components: Collection[str]) -> bool:
        """Return whether an image with this stack and these components is known to lack a plug-in."""
        needed = {self.optional_plugins[plugin]} if plugin in self.optional_plugins else set()
        return self.plugins is not None and not (plugin in self.plugins and needed <= {*components})


class Fabric(FactLayer):
    """A network between nodes; a file in `jobs/fabrics/`."""

    title: str
    short: Label
    """Short name of the fabric, used in the names of jobs."""
    plugin: str
    """Network plug-in of NCCL. `none` is NCCL's own transport. `host` is the plug-in that `setup` chooses."""
    measures: tuple[str, ...]
    """Kinds of network. The limits of a hardware profile apply to this fabric only if `network.kind` of the profile is
    one of these kinds."""
    default_for: tuple[str, ...] = ()
    """Names of profiles, and kinds of network. Without --fabric, jobs for these profiles, or else for profiles with
    these kinds of network, use this fabric."""
    setup: Text | None = None
    """Shell command that prepares the environment of each rank, before the variables of the facts are set. The owner of
    the node has installed the program that the command runs."""
    pod: Pod = Pod()
    mounts: tuple[Text, ...] = ()
    """Folders of the host that pyxis mounts, written as `FROM:TO`."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class Feature(FactLayer):
    """An option of a job that `--feature` turns on, such as `sharp`; a file in `jobs/features/`."""

    title: str
    plugin: str | None = None
    """Network plug-in of NCCL. Default: the plug-in of the fabric."""
    claims: bool = False
    """If true, a ComputeDomain gives each container a channel to the NVLink of the rack."""
    without_fabric: bool = False
    """If true, the containers get no NIC."""
    in_name: bool = True
    """If true, the name of the job contains the name of the feature."""
    comparable: bool = True
    """If true, the limits and measured results of the profile are also valid for jobs with this feature."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class SlurmOptions(Model):
    """Options of sbatch.

    `--param` has precedence, then the entry of the GPU under `nodes` in the cluster's file, then `slurm` in this file.
    """

    account: Annotated[str, FORMS["account"]] | None = None
    partition: Names | None = None
    qos: Names | None = None
    reservation: Names | None = None
    constraint: Annotated[str, FORMS["constraint"]] | None = None
    gres: Annotated[str, FORMS["gres"]] | None = None
    """Generic resources of each node, such as `gpu:h100:8`, if the cluster does not accept `--gpus-per-node`."""
    nodelist: NodeNames | None = None
    exclude: NodeNames | None = None


class Nodes(SlurmOptions):
    """Settings of the nodes with one kind of GPU in a cluster."""

    select: dict[Key, tuple[LabelValue, ...]] = Field(default_factory=dict)
    """Maps each label of a node to its accepted values."""
    cpu: Cpus | None = None
    memory: Quantity | None = None
    rack_nodes: Annotated[int, Field(gt=0)] | None = None
    """Maximum number of nodes that a job uses in each rack. Default: all nodes of the rack."""


class ClusterFabric(FactLayer):
    """Settings that a cluster adds to a fabric; a value of `fabrics` in a cluster's file."""

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
    capabilities: tuple[Annotated[str, FORMS["capability"]], ...] = ()
    """Capabilities in addition to IPC_LOCK, which pins memory."""
    seccomp: Literal["RuntimeDefault", "Unconfined"] | None = None


class LauncherPod(Model):
    """The pod that starts the ranks. This pod needs no GPU."""

    select: dict[Key, LabelValue] = Field(default_factory=dict)
    """Labels of the nodes on which launchers run."""
    cpu: Cpus | None = None
    """CPUs of the launcher. Default: 2, and one more for every 16 pairs of nodes that are measured at the same time."""
    memory: Quantity | None = None
    """Memory of the launcher. Default: 2Gi, and 64Mi more for every pair of nodes that is measured at the same time."""


GANGS_OF_PODS = ("volcano", "coscheduling")
"""Gang schedulers that need a PodGroup to start pods together. Kueue needs no PodGroup."""


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
    """Name of the Kueue or Volcano queue in which jobs wait."""
    kueue_topology: bool = False
    """If true, Kueue has a Topology with `rack-key` as a level, so Kueue can place jobs on racks."""
    quota: bool = False
    """If true, the namespace has a ResourceQuota, so every container must request cpu and memory."""
    host_network: bool = False
    """If true, workers use the network of the node."""
    ipc_lock: bool = True
    """If true, workers request the capability IPC_LOCK to pin memory. Not needed if containers have an unlimited
    memlock."""
    security: Security = Security()
    shm_size: Quantity | None = None
    """Size of /dev/shm. Default: half of the node's memory."""
    volumes: tuple[Volume, ...] = ()
    """Additional volumes of the workers."""
    tolerations: tuple[Toleration, ...] = ()
    launcher: LauncherPod = LauncherPod()
    start_minutes: Annotated[int, Field(gt=0)] = 30
    """Minutes in which all workers must start. If one does not start, the job fails and frees its GPUs."""
    keep_minutes: Annotated[int, Field(gt=0)] = 1440
    """Minutes from the end of a job until Kubernetes deletes the job and its log."""

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        queue, scheduler = self.queue, self.scheduler
        own = next(filter(DATA.patterns["operators_label"].fullmatch, self.pod_labels), None)
        mistakes = {
            "queue: add `gang: kueue` or `gang: volcano`": queue and not self.gang,
            "gang: Kueue needs a `queue`; add one": self.gang == "kueue" and not queue,
            "queue: the coscheduling plug-in has no queues; remove `queue`": self.gang == "coscheduling" and queue,
            "gang: coscheduling needs the name of its `scheduler`; add `scheduler`": self.gang == "coscheduling"
            and not scheduler,
            "scheduler: Volcano schedules its gangs itself; remove `scheduler`": self.gang == "volcano"
            and scheduler not in (None, "volcano"),
            "kueue-topology: works only with Kueue; add `gang: kueue`": self.kueue_topology and self.gang != "kueue",
            f"pod-labels: {own} is a label by which the operator finds its pods; remove this label": own,
        }
        if problem := next((problem for problem, is_so in mistakes.items() if is_so), None):
            raise ValueError(problem)
        return self


class Slurm(SlurmOptions):
    """Settings of a cluster for jobs on Slurm."""

    cpus_per_task: Annotated[int, Field(gt=0, le=9999)] = 8
    """CPUs for each rank."""
    module: Annotated[str, FORMS["modules"]] | None = None
    """Environment modules that jobs without a container load, in this order and separated by blanks."""
    images: Annotated[str, FORMS["images-folder"]] = "$HOME/.cache/imagebuild"
    """Folder for the image files that pyxis starts. All nodes must share the folder. The path may contain shell
    variables."""
    before: Text | None = None
    """Shell command that the batch script runs first. If the command fails, the job ends."""
    task_prolog: Folder | None = None
    """Program that srun runs before each rank."""
    task_epilog: Folder | None = None


class Cluster(FactLayer):
    """The settings of one cluster; a file in `jobs/clusters/`."""

    title: str
    registry: Annotated[str, FORMS["registry"]] | None = None
    """Registry and folder from which nodes pull the planned images, such as `ghcr.io/acme`."""
    interface: Text = "eth0"
    """Network interface through which ranks find each other."""
    hca: Text = "mlx5"
    """RDMA devices in the syntax of NCCL_IB_HCA: a prefix of device names, or `=` and a list of names."""
    driver: Text | None = None
    """Driver version on the nodes. A job does not choose images that need a newer driver."""
    rack_key: Key = "nvidia.com/gpu.clique"
    """Key of a node label. Nodes with the same value of this label are a rack that NVLink connects."""
    fabrics: dict[str, ClusterFabric] = Field(default_factory=dict)
    nodes: dict[Gpu, Nodes] = Field(default_factory=dict)
    """Maps the short name of a GPU, such as `h100`, to the settings of the nodes with this GPU."""
    kubernetes: Kubernetes = Kubernetes()
    slurm: Slurm = Slurm()


class JobTest(Model):
    """What a job measures: collectives with their message sizes, or what each node does alone; a file in
    `jobs/tests/`."""

    title: str
    collectives: tuple[Collective, ...] = ()
    command: str = ""
    """Script that bash runs on each node, instead of collectives. The test fails if the script fails."""
    expect: Text = ""
    """Regular expression of a line that the script must print on each node."""
    component: Label = "nccl-tests"
    """Component of the image that contains the program."""
    min_bytes: Bytes = "8"
    max_bytes: Bytes = "16G"
    factor: Text = "2"
    iterations: Text | None = None
    warmup: Text | None = None
    check: bool = True
    """If true, the nccl-tests programs check that the received data are right."""
    pairs: bool = False
    """If true, every pair of nodes is measured separately. In each round, every node is in one pair."""
    minutes: Annotated[int, Field(gt=0)] = 20
    """Time limit in minutes for the test, or for each round if pairs are measured."""

    @model_validator(mode="after")
    def _measures_one_thing(self) -> Self:
        if bool(self.collectives) == bool(self.command):
            raise ValueError("needs either `collectives` or a `command`")
        return self


class NodeFacts(FactLayer):
    """The environment variables that ranks need on every node; the file `jobs/node.yaml`."""

    title: str


class KubernetesScheduler(Model):
    """How a scheduler runs jobs on Kubernetes."""

    resource: Label
    """Name of the Kubernetes resource that a job is, as in `kubectl get mpijob`."""
    job_label: Key
    """Key of the pod label that contains the name of the job."""
    role_label: Key
    """Key of the pod label that contains the role of the pod: `launcher` or `worker`."""
    mpi_operator: bool
    """If true, an operator makes the hostfile, the ssh keys and the PodGroup. If false, the job itself does so."""
    exclusive_racks: bool
    """If true, the scheduler can run the workers of each rack as a separate job, on a rack that no other job uses."""


class SchedulerFacts(FactLayer):
    """A program that starts jobs; a file in `jobs/schedulers/`."""

    title: str
    containers: Annotated[tuple[Container, ...], Field(min_length=1)]
    """How ranks can run. The first value is the default."""
    longest_name: Annotated[int, Field(gt=0)]
    """Maximum number of characters in the name of a job."""
    kubernetes: KubernetesScheduler | None = None
    """Settings for Kubernetes. None for Slurm."""


class NcclVariables(Model):
    """The variables that the newest known release of NCCL reads; the file `nccl-params.json`."""

    release: str
    names: frozenset[str]


@dataclass(frozen=True)
class JobFacts:
    """The facts: the contents of all files in the folder `jobs/`."""

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
    """Return the contents of the file with this name. Raises ConfigError with a similar name if there is none."""
    if name not in files:
        raise ConfigError(f"--{noun} {name}: unknown {noun}{suggestion(name, files)}")
    return files[name].model


def fill_placeholders(text: str, placeholders: Mapping[str, str], where: str) -> str:
    """Return a text in which values replace placeholders (`{name}`). Raises ConfigError for an unknown placeholder."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in placeholders:
            known = ", ".join(sorted(placeholders))
            raise ConfigError(f"{where}: unknown placeholder {{{match[1]}}}; known: {known}")
        return placeholders[match[1]]

    return re.sub(r"(?<!\$){([a-z][a-z0-9-]*)}", value, text)


def default_fabric(profile: Profile, fabrics: Mapping[str, YamlFile[Fabric]]) -> str:
    """Return the fabric of a job without --fabric: the default of its profile or network kind, or `ethernet`."""
    wanted = (profile.name, profile.network.kind if profile.network else "none")
    fits = (name for want in wanted for name, fabric in fabrics.items() if want in fabric.model.default_for)
    return next(fits, "ethernet")


KINDS: Mapping[str, type[Model]] = {
    "stacks": Stack, "fabrics": Fabric, "features": Feature, "clusters": Cluster, "tests": JobTest,
    "schedulers": SchedulerFacts,
}  # fmt: skip
"""Maps each folder in `jobs/` to the type of the YAML files in the folder."""


def load_facts(*folders: Path) -> JobFacts:
    """Return the facts in all folders. A file replaces files with the same name in earlier folders.
    Raises ConfigError with all mistakes, each with its file and line."""
    mistakes = Mistakes()
    paths = {path.relative_to(folder).as_posix(): path for folder in folders for path in sorted(folder.rglob("*.*"))}

    def load(name: str, model: type[M]) -> YamlFile[M] | None:
        return load_yaml(paths.get(name, folders[-1] / name), model, mistakes)

    kinds: dict[str, Mapping[str, YamlFile[Any]]] = {}
    for kind, model in KINDS.items():
        files = {PurePath(name).stem: load(name, model) for name in paths if PurePath(name).match(f"{kind}/*.yaml")}
        if not files:
            problem = "this folder contains no *.yaml file; name a complete copy of the folder `jobs` with --facts"
            mistakes.add(str(folders[-1] / kind), problem)
        kinds[kind] = {name: file for name, file in files.items() if file}
    node, nccl_variables = load("node.yaml", NodeFacts), load("nccl-params.json", NcclVariables)
    fabrics = kinds["fabrics"]
    for cluster in kinds["clusters"].values():
        for name in set(cluster.model.fabrics) - set(fabrics):
            mistakes.add(cluster.at("fabrics", name), f"fabrics.{name}: unknown fabric{suggestion(name, set(fabrics))}")
        _check_volumes(cluster, fabrics, mistakes)
    # Without this check, a condition (`when`) with a misspelled name would never be true, without any message.
    known = {*CONDITIONS, *COLLECTIVES, *kinds["features"]}
    for file in chain(filter(None, [node]), *(files.values() for files in kinds.values())):
        for loc in file.lines:
            if loc[-2:-1] == ("when",) and loc[-1] not in known:
                problem = f"unknown name in a condition{suggestion(str(loc[-1]), known)}"
                mistakes.add(file.at(*loc), f"{dotted_key(loc)}: {problem}")
    mistakes.stop_if_any()
    assert node
    assert nccl_variables
    return JobFacts(**kinds, node=node, nccl_variables=nccl_variables.model)


def _check_volumes(cluster: YamlFile[Cluster], fabrics: Mapping[str, YamlFile[Fabric]], mistakes: Mistakes) -> None:
    """Add a mistake for each volume of a cluster that has the name or path of another volume in the same pod."""
    for name, fabric in fabrics.items():
        pod, site = fabric.model.pod, cluster.model.fabrics.get(name, ClusterFabric()).pod
        taken = {"dshm", "/dev/shm", *(volume.name for sidecar in pod.sidecars for volume in sidecar.volumes)}  # noqa: S108
        taken |= {text for volume in pod.volumes for text in (volume.name, volume.mount)}
        volumes = cluster.model.kubernetes.volumes
        own: dict[Loc, Volume] = {("kubernetes", "volumes", i): v for i, v in enumerate(volumes)}
        own |= {("fabrics", name, "pod", "volumes", i): v for i, v in enumerate(site.volumes)}
        for key, volume in own.items():
            if taken & {volume.name, volume.mount}:
                problem = "another volume of the pod has this name or path; change `name` or `mount`"
                mistakes.add(cluster.at(*key), f"{dotted_key(key)}: {problem}")
            taken |= {volume.name, volume.mount}
