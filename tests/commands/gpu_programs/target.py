"""The description of the GPU that XLA compiles for.

Source: NVIDIA H100 Tensor Core GPU Architecture (SXM5), CUDA C++ Programming Guide, table of compute capability 9.0.
"""

from __future__ import annotations

NAME = "NVIDIA H100 SXM"

# XLA's GpuTargetConfigProto. Sizes in bytes, bandwidth in bytes per second.
H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100"
dnn_version_info { major: 9 minor: 10 patch: 0 }
gpu_device_info {
  name: "NVIDIA H100"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}
"""
