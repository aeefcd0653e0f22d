"""A container's limits of memory and processor time, as the kernel's files state them in its several ways."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest
from longreach.engine.kv_cache.groups import PageGroups
from longreach.engine.messages import EngineConfig
from longreach.engine.startup import capacity
from longreach.engine.startup.cgroups import cpu_quota, memory_limits
from longreach.engine.startup.host_memory import HostMemory, from_vm_stat, host_memory, thread_count
from longreach.engine.startup.phases import elapsed, process_seconds

GIB = 1 << 30
NONE_V1 = str(2**63 - 4096)


def machine(
    root: Path, groups: str, mounts: str, files: Mapping[str, str] = MappingProxyType({}), available: int = 100 * GIB
) -> Path:
    """A file system as a process sees it; `files` by their path below /sys/fs/cgroup."""
    proc = root / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {available // 1024} kB\n")
    (proc / "self" / "cgroup").write_text(groups)
    (proc / "self" / "mountinfo").write_text("22 1 8:1 / / rw shared:1 - ext4 /dev/sda rw\n" + mounts)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


V2 = "31 22 0:26 {top} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V1_CPU = "36 31 0:33 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"


def test_a_container_of_version_2_sees_its_limit_at_the_top(tmp_path: Path) -> None:
    files = {"memory.max": str(2 * GIB), "memory.current": str(GIB), "memory.stat": f"inactive_file {GIB // 2}"}
    root = machine(tmp_path, "0::/\n", V2.format(top="/"), files)
    assert host_memory(root) == HostMemory(3 * GIB // 2, "memory.max of the control group /, 2.0 GiB")


def test_a_limit_of_a_group_above_holds_with_what_all_below_it_use(tmp_path: Path) -> None:
    files = {
        "pod/memory.max": str(3 * GIB),
        "pod/memory.current": str(2 * GIB),
        "pod/app/memory.max": str(4 * GIB),
        "pod/app/memory.current": "4096",
        "pod/app/memory.high": "max",
    }
    root = machine(tmp_path, "0::/pod/app\n", V2.format(top="/"), files)
    assert host_memory(root) == HostMemory(GIB, "memory.max of the control group /pod, 3.0 GiB")


def test_memory_high_is_a_limit(tmp_path: Path) -> None:
    files = {"app/memory.max": str(4 * GIB), "app/memory.high": str(GIB), "app/memory.current": "0"}
    root = machine(tmp_path, "0::/app\n", V2.format(top="/"), files)
    assert host_memory(root) == HostMemory(GIB, "memory.high of the control group /app, 1.0 GiB")


@pytest.mark.parametrize(
    ("group", "top", "folder"),
    [
        ("/docker/abc", "/", "docker/abc/"),  # on the host
        ("/docker/abc", "/docker/abc", ""),  # in a container that sees its own group alone
        ("/", "/", ""),  # in a namespace of groups
        ("/docker/gone", "/", ""),  # the name is of a namespace that this mount is not of
    ],
)
def test_version_1_is_read_wherever_the_group_is_mounted(tmp_path: Path, group: str, top: str, folder: str) -> None:
    files = {
        f"memory/{folder}memory.limit_in_bytes": str(2 * GIB),
        f"memory/{folder}memory.usage_in_bytes": str(GIB),
        f"memory/{folder}memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}",
    }
    groups = f"9:name=systemd:/\n4:memory:{group}\n0::/\n"
    memory = host_memory(machine(tmp_path, groups, V1.format(top=top), files))
    assert memory.available == GIB + GIB // 4
    assert memory.limit.startswith("memory.limit_in_bytes of the control group /")
    assert memory.limit.endswith(", 2.0 GiB")


def test_no_limit_and_a_limit_beyond_the_machine_are_the_machine(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": NONE_V1, "memory/memory.usage_in_bytes": "77"}
    first = machine(tmp_path / "1", "4:memory:/\n", V1.format(top="/"), files, 5 * GIB)
    assert host_memory(first) == HostMemory(5 * GIB)
    files = {"memory.max": "max", "memory.current": "77"}
    second = machine(tmp_path / "2", "0::/\n", V2.format(top="/"), files, 5 * GIB)
    assert host_memory(second) == HostMemory(5 * GIB)
    assert memory_limits(second) == []
    assert host_memory(machine(tmp_path / "3", "", "", available=5 * GIB)) == HostMemory(5 * GIB)


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {"memory.max": "1000", "memory.current": "5000"}
    assert host_memory(machine(tmp_path, "0::/\n", V2.format(top="/"), files)).available == 0


def test_a_mount_may_have_a_blank_in_its_name(tmp_path: Path) -> None:
    mounts = "31 22 0:26 / /sys/fs/cgroup/a\\040b rw - cgroup2 cgroup2 rw\n"
    root = machine(tmp_path, "0::/\n", mounts, {"a b/memory.max": "1000"})
    assert host_memory(root).available == 1000


def test_a_limit_of_processor_time_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    v2 = machine(
        tmp_path / "2",
        "0::/pod/app\n",
        V2.format(top="/"),
        {"pod/cpu.max": "250000 100000", "pod/app/cpu.max": "max 100000"},
    )
    assert cpu_quota(v2) == 2.5
    assert [thread_count(threads, v2) for threads in (1, 2, 64)] == [1, 2, 3]
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "50000", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    v1 = machine(tmp_path / "1", "4:cpu,cpuacct:/\n", V1_CPU, files)
    assert (cpu_quota(v1), thread_count(64, v1)) == (0.5, 1)
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    free = machine(tmp_path / "0", "4:cpu,cpuacct:/\n", V1_CPU, files)
    assert (cpu_quota(free), thread_count(64, free)) == (None, 64)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert thread_count(64, v2) == 64


def test_what_does_not_fit_names_the_limit(tmp_path: Path) -> None:
    files = {"app/memory.max": str(GIB), "app/memory.current": str(GIB // 2)}
    memory = host_memory(machine(tmp_path, "0::/app\n", V2.format(top="/"), files))
    named = r"512\.0 MiB of host memory that can be had \(within memory\.max of the control group /app, 1\.0 GiB\)"
    with pytest.raises(ValueError, match=named):
        capacity.host_places(EngineConfig(model="m", kv_offload_bytes=4 * GIB), 4096, memory)
    demand = capacity.Demand(0, 0, 1024, 1024 * 16, PageGroups(16), 16, 16, 1 << 20, 1 << 20)
    with pytest.raises(ValueError, match=r"128\.0 MiB are there \(within memory\.max of the control group /app"):
        demand.fit(demand.host_room(memory.available), memory.why)


VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                               10000.
Pages active:                            300000.
Pages inactive:                          200000.
Pages speculative:                         5000.
Pages purgeable:                           4000.
"Translation faults":                 123456789.
"""


def test_macos_tells_its_free_memory_in_pages() -> None:
    assert from_vm_stat(VM_STAT) == 215_000 * 16_384
    with pytest.raises(ValueError, match="no size of a page"):
        from_vm_stat("Pages free: 10000.")


@pytest.mark.system
def test_without_proc_the_machine_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    command = tmp_path / "vm_stat"
    monkeypatch.setenv("PATH", str(tmp_path))
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert host_memory(tmp_path) == HostMemory(physical // 2)
    assert "free memory cannot be read" in caplog.text
    command.write_text(f"#!/bin/sh\nwhile read -r line; do echo \"$line\"; done <<'EOF'\n{VM_STAT}EOF\n")
    command.chmod(0o755)
    assert host_memory(tmp_path) == HostMemory(215_000 * 16_384)


@pytest.mark.parametrize(("told", "seconds"), [("00:07", 7), (" 01:02:03\n", 3723), ("2-00:00:01", 172_801)])
def test_the_age_of_a_process_as_ps_tells_it(told: str, seconds: float) -> None:
    assert elapsed(told) == seconds


@pytest.mark.system
def test_both_ways_to_tell_the_age_of_a_process_agree(tmp_path: Path) -> None:
    assert process_seconds(tmp_path / "no-proc") == pytest.approx(process_seconds(), abs=2)
