"""Decide all that a job is made of: size, image, environment, and what its pods need. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from imagebuild.bench.ceilings import NotComparable, class_ceilings, rank_layout
from imagebuild.bench.judge import floor_of
from imagebuild.bench.profiles import Profile
from imagebuild.core.errors import ConfigError, suggestion
from imagebuild.core.fields import YamlFile, matches
from imagebuild.jobs import choose, environment
from imagebuild.jobs.choose import JobImage, Offer
from imagebuild.jobs.environment import FactSource, Variable
from imagebuild.jobs.facts import (
    COLLECTIVES,
    Cluster,
    ClusterFabric,
    Container,
    Expect,
    Fabric,
    Feature,
    JobFacts,
    JobRequest,
    JobTest,
    Nodes,
    Pod,
    Scope,
    SlurmOptions,
    Stack,
    find_facts,
)

Placement = Literal["anywhere", "together", "named", "kueue", "exclusive"]
"""How workers come onto racks: `together` by an affinity for each other, `named` on racks that the user names, `kueue`
by its topology, `exclusive` by JobSet, which gives each of its jobs a rack that no other JobSet uses."""
IMPORT_MINUTES = 15
"""Time for pyxis to import an image that no job had before, beside the time of the measurements."""
NAME_LENGTH = {"mpijob": 51, "jobset": 43, "slurm": 200}
"""Longest name of a job. Names of pods have at most 63 characters, of which the MPI operator adds up to 12
(`-worker-9999`) and JobSet up to 20 (`-worker-0-9999-abcde`)."""
DEFAULT_NODES = 8
"""Nodes of a job without --nodes on hardware whose NVLink ends at the node."""


@dataclass(frozen=True)
class Scale:
    """Hold the size of a job."""

    nodes: int
    racks: int
    nodes_per_rack: int
    """All nodes, where NVLink ends at the node."""


@dataclass(frozen=True)
class Job:
    """Describe a job: each property is decided by those above it. `resolve_job` has asked for all of them.

    Properties raise ConfigError for unknown names, and with the reason for what is impossible.
    """

    request: JobRequest
    profile: Profile
    facts: JobFacts
    offer: Offer

    # What the request names

    @cached_property
    def container(self) -> Container:
        asked = self.request.container
        if self.request.scheduler == "slurm":
            return asked or "pyxis"
        if asked:
            raise ConfigError(f"--container {asked}: is for Slurm only; Kubernetes always runs the image")
        return "kubernetes"

    @cached_property
    def settings(self) -> tuple[Mapping[str, str], tuple[Variable, ...]]:
        return environment.parse_settings(self.request.settings, self.container)

    @cached_property
    def parameters(self) -> Mapping[str, str]:
        return self.settings[0]

    @cached_property
    def fabric(self) -> Fabric:
        return find_facts(self.facts.fabrics, "fabric", self.request.fabric)

    @cached_property
    def cluster(self) -> Cluster:
        return find_facts(self.facts.clusters, "cluster", self.request.cluster)

    @cached_property
    def site(self) -> ClusterFabric:
        """Return the additions of the cluster to the fabric."""
        return self.cluster.fabrics.get(self.request.fabric, ClusterFabric())

    @cached_property
    def gpu(self) -> str:
        """Return the short name of the GPU, such as `h100`."""
        if self.profile.gpu.compute_capability is None:
            raise ConfigError(f"--profile {self.profile.name}: nccl-tests runs on NVIDIA GPUs only; take another")
        names = ", ".join(self.profile.gpu.names)
        if match := re.search(r"[A-Z]{1,3}[0-9]{2,4}", names):
            return match[0].lower()
        raise ConfigError(f"profile {self.profile.name}: gpu.names: no model such as H100 in {names}; add one")

    # How large it is

    @cached_property
    def nodes(self) -> Nodes:
        """Return the nodes of the cluster that the job may use."""
        own = {name: self.parameters[name] for name in ("cpu", "memory") if name in self.parameters}
        return (self.cluster.nodes.get(self.gpu) or Nodes()).model_copy(update=own)

    @cached_property
    def mnnvl(self) -> bool:
        """Return whether NVLink connects several nodes."""
        return self.profile.hosts_per_domain > 1

    @cached_property
    def scale(self) -> Scale:
        """Return the size by `--nodes` or `--racks`, with equal numbers of nodes in all racks."""
        nodes, racks, domain = self.request.nodes, self.request.racks, self.profile.hosts_per_domain
        if nodes is not None and racks is not None:
            raise ConfigError("--nodes and --racks exclude each other; use one of them")
        if not self.mnnvl:
            if racks is not None:
                raise ConfigError(f"--racks {racks}: NVLink of {self.profile.name} ends at the node; use --nodes")
            return Scale(nodes or DEFAULT_NODES, 1, nodes or DEFAULT_NODES)
        rack_nodes = min(int(self.parameters.get("rack-nodes") or self.nodes.rack_nodes or domain), domain)
        if nodes is None:
            return Scale(rack_nodes * (racks or 1), racks or 1, rack_nodes)
        needed = -(-nodes // rack_nodes)
        if nodes % needed:
            fewer = next(number for number in range(nodes - 1, 0, -1) if number % -(-number // rack_nodes) == 0)
            problem = f"cannot be divided evenly among {needed} racks of up to {rack_nodes} nodes"
            raise ConfigError(f"--nodes {nodes}: {problem}; use {fewer} or a whole number of --racks")
        return Scale(nodes, needed, nodes // needed)

    @cached_property
    def rounds(self) -> int:
        """Return how many measurements, one after the other, share the time limit; 1 if it is for all of them."""
        test = find_facts(self.facts.tests, "test", self.request.test)
        if not test.pairs:
            return 1
        if self.scale.nodes == 1:
            raise ConfigError(f"--test {self.request.test}: one node has no pairs; take more --nodes")
        return len(test.collectives) * (self.scale.nodes - 1 + self.scale.nodes % 2)

    @cached_property
    def test(self) -> JobTest:
        """Return what is measured, with the limit of the whole job in minutes."""
        test = self.facts.tests[self.request.test].model
        minutes = test.minutes * self.rounds + (IMPORT_MINUTES if self.container == "pyxis" else 0)
        minutes = int(self.parameters.get("minutes") or minutes)
        if minutes * 2 < self.rounds:
            least = -(-self.rounds // 2)
            raise ConfigError(f"--param minutes={minutes}: too few for {self.rounds} rounds; take {least} or more")
        return test.model_copy(update={"minutes": minutes})

    @cached_property
    def ranks(self) -> int:
        """Return the number of ranks: one for each GPU."""
        return self.scale.nodes * self.profile.node.gpus

    @cached_property
    def run_nodes(self) -> int:
        """Return the number of nodes that take part in one measurement."""
        return 2 if self.test.pairs else self.scale.nodes

    @cached_property
    def run_ranks(self) -> int:
        return self.run_nodes * self.profile.node.gpus

    # What it can do

    @cached_property
    def features(self) -> Mapping[str, Feature]:
        implied = ["multirack"] if self.scale.racks > 1 and "multirack" in self.facts.features else []
        names = sorted({*self.request.features, *implied})
        return {name: find_facts(self.facts.features, "feature", name) for name in names}

    @cached_property
    def plugin(self) -> str:
        asked = self.parameters.get("plugin")
        plugin = asked or self.site.plugin or self.fabric.plugin
        for name, feature in self.features.items():
            if feature.plugin and asked not in (None, feature.plugin):
                problem = f"--feature {name} needs the plug-in {feature.plugin}"
                raise ConfigError(f"--param plugin={plugin}: {problem}; leave one of them out")
            plugin = feature.plugin or plugin
        return plugin

    @cached_property
    def conditions_without_image(self) -> Mapping[str, str]:
        """Return name → value of what conditions (`when`) of the facts can use, before an image is chosen."""
        test, scale, network = self.test, self.scale, self.profile.network
        # of pairs, those with nodes of two racks do not have it
        rack_nvlink = self.mnnvl and scale.nodes > 1 and not (test.pairs and scale.racks > 1)
        yes_or_no = {
            **{name: name in self.features for name in self.facts.features},
            **{name: name in test.collectives for name in COLLECTIVES},
            "mnnvl": self.mnnvl,
            "rack-nvlink": rack_nvlink and "nics" not in self.features,
            "nvls": self.profile.links[-1].nvls,
        }
        return {
            **{name: "yes" if value else "no" for name, value in yes_or_no.items()},
            "scheduler": self.request.scheduler,
            "container": self.container,
            "profile": self.profile.name,
            "gpu": self.gpu,
            "arch": self.profile.node.cpu,
            "capability": self.profile.gpu.compute_capability or "",
            "network": network.kind if network else "none",
            "fabric": self.request.fabric,
            "cluster": self.request.cluster,
            "test": self.request.test,
            "nodes": str(scale.nodes),
            "racks": str(scale.racks),
            "plugin": self.plugin,
        }

    def refuse_bad_combinations(self, conditions: Mapping[str, str]) -> None:
        """Raise ConfigError if an option does not fit; ignore rules whose facts are not decided yet."""
        combined: dict[str, Fabric | Feature] = {f"--fabric {self.request.fabric}": self.fabric}
        combined |= {f"--feature {name}": feature for name, feature in self.features.items()}
        for option, facts in combined.items():
            remedy = "leave it out" if isinstance(facts, Feature) else "take another"
            for rule in (*facts.supports, *facts.excludes):
                is_wrong = matches(rule.when, conditions) == (rule in facts.excludes)
                if is_wrong and rule.when.keys() <= conditions.keys():
                    raise ConfigError(f"{option}: {rule.reason}; {remedy}")

    # What it runs

    @cached_property
    def image(self) -> JobImage:
        """Return the image that is named, or the newest that fits."""
        # First, as a bad combination is a better reason than that no image fits it.
        self.refuse_bad_combinations(self.conditions_without_image)
        request, profile, stacks = self.request, self.profile, self.facts.stacks
        if request.nccl is not None and not re.fullmatch(r"[0-9]+\.[0-9]+(\.[0-9]+)?", request.nccl):
            raise ConfigError(f"--nccl {request.nccl!r}: must be a version of NCCL such as 2.28.3")
        if self.container == "none":
            if request.image:
                raise ConfigError("--image: with --container none the nodes' own programs run; leave one of them out")
            return JobImage("", "other", request.nccl, None)
        if request.image is not None:
            image = choose.named_image(request.image, self.offer, stacks)
        else:
            plugin = "none" if self.plugin == "host" else self.plugin
            driver = self.parameters.get("driver") or self.cluster.driver
            image = choose.newest_image(self.offer, stacks, profile, plugin, driver)
        if image.arches is not None and profile.node.cpu not in image.arches:
            arches = f"is for {', '.join(image.arches)}, but {profile.name} is {profile.node.cpu}"
            raise ConfigError(f"--image {image.reference}: {arches}; use another image")
        if self.offer.unnamed and any(image.reference == target.name for target in self.offer.targets):
            raise ConfigError(
                f"{image.reference}: this name has no registry to pull it from; name yours with --registry, with "
                "`registry` in the cluster's file or with --catalog, or name an image with --image"
            )
        if image.components and "nccl-tests" not in image.components and "programs" not in self.parameters:
            remedy = "add it to the image, or name the folder of the programs with --param programs=FOLDER"
            raise ConfigError(f"--image {image.reference}: has no nccl-tests, according to the plan; {remedy}")
        return replace(image, nccl=request.nccl or image.nccl, components=(*image.components, *request.components))

    @cached_property
    def stack(self) -> Stack:
        own = {name: self.parameters[name] for name in ("programs", "suffix") if name in self.parameters}
        return self.facts.stacks[self.image.stack].model.model_copy(update=own)

    @cached_property
    def conditions(self) -> Mapping[str, str]:
        """Return name → value of everything that a condition of the facts can use."""
        nccl = self.image.nccl or self.facts.nccl_variables.release
        conditions = {**self.conditions_without_image, "stack": self.image.stack, "nccl": nccl}
        self.refuse_bad_combinations(conditions)
        return conditions

    # Its environment

    @cached_property
    def placeholders(self) -> Mapping[str, str]:
        """Return name → text of what facts can have in braces."""
        return {
            "interface": self.parameters.get("interface") or self.cluster.interface,
            "hca": self.parameters.get("hca") or self.cluster.hca,
            "cards": str(self.profile.network.count if self.profile.network else 0),
            "gpus": str(self.profile.node.gpus),
        }

    @cached_property
    def sources(self) -> list[FactSource]:
        """Return the layers of facts, lowest first: stack < fabric < node < cluster < feature < scheduler."""
        request, facts, cluster = self.request, self.facts, self.facts.clusters[self.request.cluster]

        def source(name: str, file: YamlFile[Any]) -> FactSource:
            return FactSource(name, file, file.model)

        site = f"fabric {request.fabric} of cluster {request.cluster}"
        return [
            source(f"stack {self.image.stack}", facts.stacks[self.image.stack]),
            source(f"fabric {request.fabric}", facts.fabrics[request.fabric]),
            FactSource(site, cluster, self.site, ("fabrics", request.fabric)),
            source("node", facts.node),
            source(f"cluster {request.cluster}", cluster),
            *(source(f"feature {name}", facts.features[name]) for name in self.features),
            source(f"scheduler {request.scheduler}", facts.schedulers[request.scheduler]),
        ]

    @cached_property
    def plugin_variables(self) -> list[Variable]:
        """Return the variables that name the network plug-in and its folder; `host` leaves both to the node."""
        plugin, plugins = self.plugin, self.stack.plugins
        if plugin == "host":
            return []
        if self.stack.lacks_plugin(plugin, self.image.components):
            remedy = choose.plugin_remedy(plugin, self.facts.stacks)
            advice = f"; {remedy}name another one" if remedy else suggestion(plugin, plugins or {})
            raise ConfigError(f"{self.image.reference}: the image has no plug-in {plugin!r}{advice}")
        why = "what NCCL has built in, whatever else is installed" if plugin == "none" else "this plug-in and no other"
        place = {"layer": "plug-in", "where": "plug-in"}
        variables = [Variable(name="NCCL_NET_PLUGIN", value=plugin, why=why, **place)]
        if folder := (plugins or {}).get(plugin):
            why = "where the plug-in is; it must be found first"
            variables.append(Variable(name="LD_LIBRARY_PATH", value=folder, why=why, prepend=True, **place))
        return variables

    @cached_property
    def variables(self) -> tuple[Variable, ...]:
        known = environment.layered_variables(self.sources, self.conditions, self.placeholders)
        return environment.merge([*known, *self.plugin_variables, *self.settings[1]], self.container)

    def in_scope(self, scope: Scope) -> list[Variable]:
        """Return the variables of a scope, in their order."""
        return [variable for variable in self.variables if variable.scope == scope]

    # How it is judged

    @cached_property
    def expected_lines(self) -> tuple[Expect, ...]:
        lines = (line for source in self.sources for line in source.layer.expect)
        return tuple(line for line in lines if matches(line.when, self.conditions))

    @cached_property
    def comparable(self) -> bool:
        """Return whether the profile's limits and references are valid for this job."""
        same_network = self.conditions["network"] in self.fabric.measures
        return same_network and all(feature.comparable for feature in self.features.values())

    @cached_property
    def least(self) -> Mapping[str, tuple[str, str]]:
        """Return collective → the GB/s that its best size must reach, and why: as asked for, or by the profile."""
        value, profile, collectives = self.parameters.get("min-bw"), self.profile, self.test.collectives
        if value and len(collectives) > 1:
            raise ConfigError("--param min-bw: collectives of the test reach different rates; test one collective")
        if value:
            return {collectives[0]: (value, "GB/s, by --param min-bw")}
        least: dict[str, tuple[str, str]] = {}
        if not (self.comparable and self.test.max_bytes.endswith("G")):  # smaller messages show latency
            return least
        try:
            layout = rank_layout(profile, self.run_ranks, self.run_nodes)
        except NotComparable:
            return least
        for collective in collectives:
            references = profile.references_at(collective, self.run_ranks, self.run_nodes)
            known = [reference.rate * reference.tolerance for reference in references if not reference.forced]
            if known:
                least[collective] = f"{known[-1]:.1f}", f"GB/s that {profile.name} asks of the best size"
            elif floor := floor_of(profile, layout, class_ceilings(collective, self.run_ranks, layout)):
                least[collective] = f"{floor.value:.1f}", f"GB/s: {floor.what}"
        return least

    # Where it runs

    @cached_property
    def name(self) -> str:
        features = "".join(f"{name}-" for name, feature in self.features.items() if feature.in_name)
        usual = f"{self.request.test}-{self.ranks}-{self.gpu}-{self.fabric.short}-{features}{self.scale.nodes}n"
        name, longest = self.parameters.get("name") or usual, NAME_LENGTH[self.request.scheduler]
        if len(name) > longest:
            raise ConfigError(f"--param name: {name!r} is longer than {longest} characters; set another")
        return name

    @cached_property
    def slurm_options(self) -> Mapping[str, str]:
        """Return options of sbatch: of each the first value that `--param`, the GPU's nodes and the cluster have."""
        values = {
            name: self.parameters.get(name) or getattr(self.nodes, name) or getattr(self.cluster.slurm, name)
            for name in SlurmOptions.model_fields
        }
        return {name: value for name, value in values.items() if value}

    @cached_property
    def rack_names(self) -> tuple[str, ...]:
        """Return the racks that the user names, as nodes have them in the label `rack_key`."""
        names, needed = tuple(filter(None, self.parameters.get("racks", "").split(","))), self.scale.racks
        if names and not self.mnnvl:
            raise ConfigError(f"--param racks: NVLink of {self.profile.name} ends at the node; leave it out")
        if names and len(set(names)) != needed:
            raise ConfigError(f"--param racks={','.join(names)}: the job needs {needed}; name each once")
        return names

    @cached_property
    def placement(self) -> Placement:
        """Return how workers come onto racks."""
        kube, racks = self.cluster.kubernetes, self.scale.racks
        if self.request.scheduler == "slurm" or not self.mnnvl:
            return "anywhere"
        if self.rack_names:
            return "named"
        if kube.kueue_topology:
            return "kueue"
        if racks == 1:
            return "together" if self.scale.nodes > 1 else "anywhere"
        if self.request.scheduler == "jobset" and kube.gang not in ("volcano", "coscheduling"):
            return "exclusive"
        problem = "all workers of an MPIJob have one template, the same on every rack; use jobset, or"
        if self.request.scheduler == "jobset":
            problem = f"JobSet creates a rack's workers when its first one has a place, for which {kube.gang} waits;"
        several = f"--racks {racks}" if self.request.racks else f"--nodes {self.scale.nodes} on {racks} racks"
        ways = "name the racks with --param racks=NAME,NAME or have Kueue place them (kubernetes.kueue-topology)"
        raise ConfigError(f"{several}: {problem} {ways}")

    @cached_property
    def pod(self) -> Pod:
        """Return what worker pods need: of the fabric, of the cluster, and of the nodes."""
        fabric, site, kube = self.fabric.pod, self.site.pod, self.cluster.kubernetes
        if any(feature.without_fabric for feature in self.features.values()):
            fabric, site = Pod(), Pod(select=site.select)
        amounts = {**fabric.resources, **site.resources}
        if resource := self.parameters.get("resource"):
            name, _, count = resource.rpartition(":")
            amounts = {key: amount for key, amount in amounts.items() if "/" not in key} | {name: count}
        own = {name: getattr(self.nodes, name) or amounts.get(name) for name in ("cpu", "memory")}
        own["nvidia.com/gpu"] = str(self.profile.node.gpus)
        sidecars = (*fabric.sidecars, *site.sidecars)
        containers: dict[str, Mapping[str, str | None]] = {f"nodes.{self.gpu} in the cluster's file": own}
        containers |= {f"`resources` of the sidecar {sidecar.name}": sidecar.resources for sidecar in sidecars}
        for place, has in containers.items():
            if kube.quota and not (has.get("cpu") and has.get("memory")):
                problem = "has a quota, which needs cpu and memory of all containers"
                raise ConfigError(f"--cluster {self.request.cluster}: {problem}; add them to {place}")
        annotations = {**kube.pod_annotations, **fabric.annotations, **site.annotations}
        networks, cards = site.networks or fabric.networks, site.card_networks or fabric.card_networks
        if networks:
            split = (network.rpartition("/") for network in networks)
            pairs = [{"namespace": space, "name": name} if space else {"name": name} for space, _, name in split]
            lines = ",\n".join(f"  {json.dumps(pair)}" for pair in pairs)
            annotations["k8s.v1.cni.cncf.io/networks"] = f"[\n{lines}\n]\n"
        if cards:
            number = int(self.placeholders["cards"])
            of_card = {f"eth{cards.interface + i}": f"{cards.prefix}{cards.first + i}" for i in range(number)}
            pairs = [{"interfaceName": i, "network": name} for i, name in {"eth0": "default", **of_card}.items()]
            lines = ",\n ".join(json.dumps(pair, separators=(",", ":")) for pair in pairs)
            annotations["networking.gke.io/interfaces"] = f"[{lines}]\n"
        select = {**self.nodes.select, **fabric.select, **site.select}
        if self.rack_names:
            select[self.cluster.rack_key] = self.rack_names
        others = {
            name: environment.fill_placeholders(amount, self.placeholders, name)
            for name, amount in sorted(amounts.items())
            if name not in own
        }
        return Pod.model_construct(  # of parts that were checked; nodes' cpu may be 500m, which no count may
            resources={name: amount for name, amount in own.items() if amount} | others,
            annotations=dict(sorted(annotations.items())),
            select=dict(sorted(select.items())),
            volumes=(*fabric.volumes, *kube.volumes, *site.volumes),
            sidecars=sidecars,
        )

    # What is said about it

    @cached_property
    def messages(self) -> tuple[str, ...]:
        messages, image = environment.lint(self.variables, self.facts.nccl_variables), self.image
        if image.driver and not (self.request.image or self.parameters.get("driver") or self.cluster.driver):
            advice = "if the nodes have an older one, name it with --param driver=VERSION"
            messages.append(f"note: {image.reference} needs driver {image.driver} or later; {advice}")
        if image.is_planned:
            unknown = "is planned; whether it was built and pushed is not known"
            choice = "--catalog chooses among published images, which `imagebuild catalog` lists"
            messages.append(f"note: {image.reference} {unknown}; {choice}")
        if image.nccl is None:
            assumed = self.conditions["nccl"]
            messages.append(f"note: the version of NCCL is not known, so {assumed} is assumed; name it with --nccl")
        return tuple(messages)


def resolve_job(request: JobRequest, profile: Profile, facts: JobFacts, offer: Offer) -> Job:
    """Return the job that the request asks for. Raises ConfigError with the reason if it is impossible."""
    job = Job(request, profile, facts, offer)
    for name, value in vars(Job).items():
        if isinstance(value, cached_property):
            getattr(job, name)
    return job
