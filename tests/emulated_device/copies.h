// Copies between the host and the device: one engine for each direction, which takes one copy after the other.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty_like.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

#include "aliases.h"
#include "settings.h"
#include "work.h"

namespace emulated {

// Copies of all streams that go in one direction share an engine, those of different directions do not.
struct CopyEngine {
  std::mutex busy;
  std::atomic<double>& bandwidth;
  std::atomic<int64_t>& bytes;

  void run(void* to, const void* from, size_t size) {
    std::lock_guard<std::mutex> lock(busy);
    const auto start = std::chrono::steady_clock::now();
    // Who reads too early finds no number, instead of what happens to be right already. The data come at the end, so
    // that who overwrites the source too early is seen as well.
    std::memset(to, nan_byte, size);
    const double rate = bandwidth;
    const double seconds = settings.copy_delay + (rate > 0 ? static_cast<double>(size) / rate : 0.0);
    std::this_thread::sleep_until(
        start + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(seconds)));
    std::memcpy(to, from, size);
  }
};

inline CopyEngine& engine_to_device() {
  static auto* engine = new CopyEngine{{}, settings.to_device_bandwidth, counters.to_device_bytes};
  return *engine;
}

inline CopyEngine& engine_to_host() {
  static auto* engine = new CopyEngine{{}, settings.to_host_bandwidth, counters.to_host_bytes};
  return *engine;
}

inline void copy_on_device(const at::Tensor& source, const at::Tensor& target) {
  Aliases aliases;
  enqueue(
      current_stream(), {access_of(source, false), access_of(target, true)}, "copy_",
      [from = aliases.of(source), to = aliases.of(target)] {
        at::AutoDispatchBelowADInplaceOrView below_autograd;
        sleep_for(settings.compute_delay);
        to.copy_(from);
      });
}

// Whether one run of bytes on one side is one run of bytes on the other.
inline bool is_one_piece(const at::Tensor& source, const at::Tensor& target) {
  return source.dtype() == target.dtype() && source.sizes() == target.sizes() &&
      source.strides() == target.strides() && source.is_non_overlapping_and_dense();
}

inline void copy_one_piece(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool to_device = is_on_device(target);
  const void* host_memory = to_device ? source.const_data_ptr() : target.const_data_ptr();
  const bool is_pinned = pinned_pool().contains(host_memory);
  CopyEngine& engine = to_device ? engine_to_device() : engine_to_host();
  StreamQueue& stream = current_stream();
  engine.bytes += static_cast<int64_t>(source.nbytes());
  enqueue(
      stream, {access_of(source, false), access_of(target, true)}, to_device ? "copy to device" : "copy to host",
      [&engine, to = const_cast<void*>(target.const_data_ptr()), from = source.const_data_ptr(),
       size = source.nbytes()] { engine.run(to, from, size); });
  if (is_pinned && non_blocking) {
    pinned_pool().record_stream(host_memory, stream.number);
    return;
  }
  counters.pageable_copies += is_pinned ? 0 : 1;
  ++counters.host_synchronisations;
  wait_on_host(stream);
}

// `copy_` where one of the tensors or both are on the device.
inline at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) {
    return target;
  }
  if (is_on_device(source) && is_on_device(target)) {
    copy_on_device(source, target);
  } else if (is_one_piece(source, target)) {
    copy_one_piece(source, target, non_blocking);
  } else {
    // As CUDA does: converted where it is, copied in one piece, and brought into its layout where it is wanted.
    const at::Tensor from = source.to(target.scalar_type()).expand_as(target).contiguous();
    const at::Tensor to =
        target.is_contiguous() ? target : at::empty_like(target, target.options(), at::MemoryFormat::Contiguous);
    copy_one_piece(from, to, non_blocking);
    if (!to.is_same(target)) {
      target.copy_(to, non_blocking);
    }
  }
  return target;
}

inline at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  target.resize_(source.sizes());
  return copy_from(source, target, false);
}

// `.item()`
inline at::Scalar read_number(const at::Tensor& tensor) {
  ++counters.items;
  ++counters.host_synchronisations;
  enqueue(current_stream(), {access_of(tensor, false)}, "item", [] {});
  wait_on_host(current_stream());
  return at::_local_scalar_dense(Aliases().of(tensor));
}

} // namespace emulated
