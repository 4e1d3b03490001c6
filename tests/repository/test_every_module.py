"""Each module `a/b` of the library is tested in `a/test_b` of the tests, or `ELSEWHERE` names another test file, with the reason."""

from __future__ import annotations

from pathlib import Path

from support.paths import TESTS

SOURCE = TESTS.parent / "src" / "dynaxla"

# Modules that are tested as parts of something larger, by the file of these tests.
ELSEWHERE = {
    # A class without a body, and types, which mypy checks.
    "bench/test_argument_checks.py": "bench/benchmark_error",
    "buffers/test_native.py": "buffers/protocol",
    # The steps from TorchDynamo's graph to programs.
    "test_backend.py": "aot",
    "passes/joint/test_partition.py": "passes/joint/saved_clones",
    "engine/test_xla.py": "engine/protocol engine/unit engine/compile engine/program_cache",
    "engine/test_scheduler.py": "engine/frozen_values",
    "engine/test_bucket.py": "engine/padded_calls",
    "engine/test_records.py": "engine/stored",
    # Graphs that torch runs; numbers in recorded steps.
    "engine/test_eager_executable.py": "engine/build",
    "training/test_traced_numbers.py": "runtime/number_tracer",
    # Parts of a contest.
    "autoselect/test_contest.py": "autoselect/verification autoselect/competing_engines",
    "lowering/test_implementations.py": "lowering/ops/weight_gradients",
    # Only rows of a table.
    "lowering/test_every_op.py": "lowering/ops/synonyms lowering/ops/unfolding",
    "lowering/cpu/test_faster_kernels.py": "lowering/cpu/measurements",
    # Common parts of several lowerings are tested with the lowerings.
    "lowering/ops/test_average_pooling.py": "lowering/ops/windows",
    "lowering/ops/test_normalization.py": "lowering/ops/moments",
    "lowering/ops/test_products_of_updates.py": "lowering/ops/indexed_slices",
    # These modules determine the order of torch's, XLA's and the host's work.
    "commands/gpu_programs/test_order_of_calls.py": "runtime/streams runtime/late_checks",
    # The parts of an explanation, and its output formats.
    "explained/test_explain_function.py": "explained/graph_breaks explained/event_collector",
    "explained/test_page.py": "explained/advice explained/as_text explained/explanation explained/formatting",
    "interop/test_export.py": "interop/dynamic_sizes",
    "artifact/test_model.py": "artifact/xla_options",
    # A process cannot disable the device, so the device is tested in separate processes.
    "device/test_eager_mode.py": "device/op_compiler device/cpu_fallback device/kernels",
    "device/test_lazy_mode.py": "device/lazy_programs",
    "device/test_autocasting.py": "device/torch_streams",
    "device/test_registration.py": (
        "device/storages device/storage_methods device/copies device/pjrt_devices device/generators device/torch_module "
        "device/device_templates"
    ),
    "device/test_models_on_the_device.py": "device/module_moves",
    "device/test_simulated_tpu.py": "passes/joint/saved_views",
    # Communication of processes is tested with several processes.
    "many_processes/test_collectives.py": "lowering/ops/collectives training/inplace_collectives",
    "many_processes/test_process_collectives.py": ("lowering/xla_collectives runtime/tcp_connections runtime/private_processes"),
    "test_partitioning.py": "passes/aten/global_view engine/partitioned lowering/ops/process_values runtime/process_meshes",
    "training/test_data_parallel.py": "training/eager_collectives training/local_shards training/parallel_modules",
    "training/test_fully_sharded.py": "runtime/private_fsdp",
    "training/test_tracked_arrays.py": "guards/numpy_arrays",
    "runtime/test_self_tests.py": "runtime/private_self_tests lowering/cpu/onednn_support",
    # A process has several devices only from its start.
    "sharding/test_marking.py": ("sharding/mesh runtime/meshes device/gradient_shardings lowering/ops/sharding_constraints"),
    # A search that compiles without running, in a process with several devices.
    "sharding/test_planning.py": "engine/dry_run sharding/virtual_tensors sharding/placements",
    "sharding/test_traffic.py": "runtime/replica_groups user_frames sharding/charts sharding/text_tables",
    # The parts of a walk.
    "guards/test_object_graph.py": "guards/object_walker guards/reference_checks",
}


def _modules() -> set[str]:
    return {
        path.relative_to(SOURCE).with_suffix("").as_posix() for path in SOURCE.rglob("*.py") if path.stem not in ("__init__", "__main__")
    }


def _test_of(module: str) -> str:
    folder, _, name = module.rpartition("/")
    return f"{folder}/test_{name}.py" if folder else f"test_{name}.py"


def test_every_module_has_a_test() -> None:
    listed = {module for modules in ELSEWHERE.values() for module in modules.split()}
    missing = [module for module in sorted(_modules() - listed) if not (TESTS / _test_of(module)).exists()]
    assert not missing, f"no test file of its own name, and none in {Path(__file__).name}"


def test_listed_modules_and_tests_exist() -> None:
    assert [test for test in ELSEWHERE if not (TESTS / test).exists()] == []
    modules = [module for text in ELSEWHERE.values() for module in text.split()]
    assert len(set(modules)) == len(modules)
    assert sorted(set(modules) - _modules()) == [], "these modules do not exist"
    assert [module for module in modules if (TESTS / _test_of(module)).exists()] == [], "these have a test file of their own name"
