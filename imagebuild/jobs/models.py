"""The types of the facts in `jobs/`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from imagebuild.component import Support
from imagebuild.fields import Condition, Model

Scheduler = Literal["mpijob", "jobset", "slurm"]
Container = Literal["kubernetes", "pyxis", "none"]
Scope = Literal["rank", "container", "launcher", "batch"]
Text = Annotated[str, Field(pattern=r"^[^\n\r\x00]*$")]
"""One line."""
Value = Annotated[str, Field(pattern=r"""^[^'"`\\\x00-\x1f\x7f]*$""")]
"""One line without quotes or backslashes, which mean something to one of the shells and files that it passes."""
EnvName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]

OVERRIDABLE = ("NCCL_NET_PLUGIN", "LD_LIBRARY_PATH", "UCX_NET_DEVICES", "NCCL_IB_HCA")
"""Names that a later layer may set anew; any other name with two values stops."""


COLLECTIVES = (
    "all_reduce", "all_gather", "alltoall", "alltoallv", "broadcast", "gather", "hypercube", "reduce", "reduce_scatter",
    "scatter", "sendrecv",
)  # fmt: skip
CONDITIONS = (
    "arch", "capability", "cluster", "container", "fabric", "gpu", "mnnvl", "nccl", "network", "nodes", "nvls",
    "plugin", "profile", "rack-nvlink", "racks", "scheduler", "stack", "test",
)  # fmt: skip
"""What conditions can ask about, beside features and collectives, which are `yes` or `no`."""


class Env(Model):
    """A variable of the environment."""

    name: EnvName
    value: Value | None = None
    """`{interface}`, `{hca}` and other parameters are filled in. None hands on the value that the launcher has."""
    scope: Scope = "rank"
    """Who must have it: a `rank`'s process; the `container`'s own environment, before it starts; the `launcher`, which
    is mpirun; or the `batch` script of Slurm."""
    why: Text
    """One line, which becomes the comment."""
    when: Condition = Field(default_factory=dict)
    """Facts such as `nccl: "<2.27"`, `scheduler: slurm`, `mnnvl: "yes"`."""
    prepend: bool = False
    """The value is a folder that goes before those the rank has already."""


class Expect(Model):
    """What the output must show, because NCCL goes on without what was asked for."""

    line: Text
    """Extended regular expression, as `grep -E` takes it."""
    why: Text
    when: Condition = Field(default_factory=dict)


class Layer(Model):
    """What facts of every kind can add."""

    env: tuple[Env, ...] = ()
    expect: tuple[Expect, ...] = ()


class Volume(Model):
    """A folder or device of the host in the benchmark's container."""

    name: str
    host: Text
    mount: Text
    type: str | None = None
    """As Kubernetes has it: `Directory`, `CharDevice`, …"""
    read_only: bool = False


class Sidecar(Model):
    """A container that runs beside the benchmark's in every worker."""

    name: str
    image: Text
    command: tuple[Text, ...]
    env: dict[str, Text] = Field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    mounts: dict[str, Text] = Field(default_factory=dict)
    """Name of a volume → where it is mounted."""
    volumes: tuple[Volume, ...] = ()


class Pod(Model):
    """What a fabric needs of a worker pod."""

    resources: dict[str, Text] = Field(default_factory=dict)
    """Extended resource → how many; requests and limits are the same."""
    annotations: dict[str, str] = Field(default_factory=dict)
    networks: tuple[str, ...] = ()
    """Multus networks, as `namespace/name`."""
    select: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Label of nodes → the values that will do."""
    volumes: tuple[Volume, ...] = ()
    sidecars: tuple[Sidecar, ...] = ()


class Stack(Layer):
    """What is in an image; `stacks/`."""

    title: str
    images: tuple[str, ...] = ()
    """Globs of image references; the first stack that has one that fits counts. An image of the plan is known by the
    components it has."""
    components: tuple[str, ...] = ()
    """Components whose presence tells an image of the plan."""
    prefer: int = 0
    """Of images that fit, those with the highest number are taken."""
    programs: Text = "/opt/nccl_tests/build"
    """Folder of nccl-tests."""
    suffix: Text = ""
    """Behind the name of a program."""
    plugins: dict[str, Text] | None = None
    """Network plug-in of NCCL → its folder, or nothing where the loader finds it. None: what there is is not known."""


class Fabric(Layer):
    """How nodes are joined; `fabrics/`."""

    title: str
    short: str
    """In names of jobs."""
    plugin: str
    """Network plug-in of NCCL: `none` is what NCCL has built in, `host` what the host has and `setup` chooses."""
    measures: tuple[str, ...]
    """Networks of profiles that this is: only with one of those, the profile's numbers are about the job."""
    setup: Text | None = None
    """Shell command that sets the environment of a rank to what the node's owner wants; facts come after it."""
    pod: Pod = Pod()
    mounts: tuple[Text, ...] = ()
    """Folders of the host, `FROM:TO`, that pyxis mounts."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class Feature(Layer):
    """Something a job can do in addition; `features/`."""

    title: str
    plugin: str | None = None
    """Instead of the fabric's."""
    claims: bool = False
    """A ComputeDomain gives containers their channel of the rack-wide NVLink."""
    without_fabric: bool = False
    """Containers get no network card."""
    in_name: bool = True
    """The feature is in the job's name."""
    comparable: bool = True
    """The profile's numbers are about jobs with it, too."""
    supports: tuple[Support, ...] = ()
    excludes: tuple[Support, ...] = ()


class Nodes(Model):
    """Nodes of a kind in a cluster."""

    select: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    cpu: Text | None = None
    memory: Text | None = None
    partition: Text | None = None
    constraint: Text | None = None
    rack_nodes: Annotated[int, Field(gt=0)] | None = None
    """Nodes of a rack that jobs may use, where not all."""


class Site(Layer):
    """What a cluster adds to a fabric."""

    pod: Pod = Pod()
    plugin: str | None = None
    mounts: tuple[Text, ...] = ()
    nodes: dict[str, Nodes] = Field(default_factory=dict)
    """As the cluster's, for nodes that have this fabric."""


class Toleration(Model):
    """A taint that workers may ignore."""

    key: str
    operator: Literal["Exists", "Equal"] = "Exists"
    value: str | None = None
    effect: str | None = None


class Cluster(Layer):
    """The constants of a site; `clusters/`."""

    title: str
    interface: Text = "eth0"
    """Network interface that ranks find each other by."""
    hca: Text = "mlx5"
    """How names of RDMA devices begin, as NCCL_IB_HCA takes it."""
    driver: Text | None = None
    """Of the nodes; images that need a newer one are not taken."""
    rack_key: Text = "nvidia.com/gpu.clique"
    """Label of nodes that says which rack-wide NVLink they are on."""
    ipc_lock: bool = True
    """Workers ask for the capability to pin memory; not needed where containers have unlimited memlock."""
    fabrics: dict[str, Site] = Field(default_factory=dict)
    nodes: dict[str, Nodes] = Field(default_factory=dict)
    """GPU, as job names have it → its nodes."""
    launcher_select: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[Toleration, ...] = ()
    labels: dict[str, Text] = Field(default_factory=dict)
    """Of the job, for example a queue's."""
    cpus_per_task: Annotated[int, Field(gt=0)] = 8
    """For Slurm: CPUs of a rank."""
    module: Text | None = None
    """Environment module that jobs without a container load."""
    images: Text = "$HOME/.cache/imagebuild"
    """Folder that all nodes share, for images that pyxis starts; may name variables of the shell."""


class JobTest(Model):
    """What is measured; `tests/`."""

    title: str
    collectives: Annotated[tuple[str, ...], Field(min_length=1)]
    min_bytes: Text
    max_bytes: Text
    factor: Text = "2"
    iterations: Text | None = None
    warmup: Text | None = None
    check: bool = True
    """Results are compared with what they should be."""
    large: bool = False
    """All messages are so large that their average can be held against what the profile's threshold is for the best."""
    minutes: Annotated[int, Field(gt=0)] = 20


class SchedulerFacts(Layer):
    """What a scheduler needs; `schedulers/`."""

    title: str


class NodeFacts(Layer):
    """What the hardware of a node needs; `node.yaml`."""

    title: str


class Parameter(Model):
    """A variable of NCCL."""

    since: str
    until: str
    absent: tuple[str, ...] = ()
    defaults: dict[str, str] = Field(default_factory=dict)
    """Release from which on it has the default; empty where that is no number."""
    documented: bool = False


class Parameters(Model):
    """The file `nccl-params.json`: which names which releases of NCCL read."""

    releases: tuple[str, ...]
    names: dict[str, Parameter]
