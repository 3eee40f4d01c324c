// Work on a stream: how it is queued, and which memory it says that it reads and writes.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <string>
#include <vector>

#include "allocator.h"
#include "history.h"
#include "streams.h"

namespace emulated {

inline bool is_on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == device_type;
}

// All bytes from a tensor's first element to its last. Strides are never negative.
inline Access access_of(const at::Tensor& tensor, bool writes) {
  const char* memory = static_cast<const char*>(tensor.storage().data());
  if (memory == nullptr || tensor.numel() == 0) {
    return {nullptr, nullptr, writes};
  }
  int64_t last = tensor.storage_offset();
  for (int64_t dimension = 0; dimension < tensor.dim(); ++dimension) {
    last += (tensor.size(dimension) - 1) * tensor.stride(dimension);
  }
  const auto item = static_cast<int64_t>(tensor.itemsize());
  return {memory + tensor.storage_offset() * item, memory + (last + 1) * item, writes};
}

// Guarded by order_mutex.
inline Block* find_block(const char* address) {
  Block* block = device_pool().find(address);
  return block != nullptr ? block : pinned_pool().find(address);
}

// Queues work on a stream. Threads of streams know nothing of order: clocks are read and merged here, when the host
// queues the work, because this is what decides what it is ordered after.
inline void enqueue(
    StreamQueue& stream, const std::vector<Access>& accesses, const std::string& name, std::function<void()> task) {
  std::lock_guard<std::mutex> lock(order_mutex);
  stream.clock.merge(host_clock);
  const uint64_t count = ++stream.clock.counts[stream.number];
  for (const Access& access : accesses) {
    Block* block = access.begin == access.end ? nullptr : find_block(access.begin);
    if (block != nullptr) {
      block->history.add(access, stream.number, count, stream.clock, name);
    }
  }
  // Still under the lock, so that work of several threads of the host lies in the queue in the order of its counts.
  stream.push(std::move(task));
}

} // namespace emulated
