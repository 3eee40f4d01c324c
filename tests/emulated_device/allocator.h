// Memory of the device and pinned memory of the host: blocks that are kept when they are given back, and used again.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// The rules are those of CUDA's allocators, as far as they decide whether a program is right:
//
// * A block belongs to the stream that was current when it was allocated. Given back, it can be used again by that
//   stream at once, because what this stream does with it next comes after what it has done with it. Nobody checks
//   what other streams do with it.
// * record_stream tells that another stream uses a block. Then it can be used again when all has ended that was queued
//   on that stream by the time the block was given back.
// * Pinned memory belongs to no stream. Copies that do not block record their stream by themselves. Sizes are rounded
//   up to a power of two.
// * The device has a limit. What is kept for later use counts, and is given back before an allocation fails.
//
// Blocks are not divided: a larger one is used if it is at most a quarter larger.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <memory>
#include <new>
#include <set>
#include <utility>

#include "clocks.h"
#include "history.h"
#include "streams.h"

namespace emulated {

constexpr c10::DeviceType device_type = c10::DeviceType::PrivateUse1;
inline const c10::Device the_device(device_type, 0);
constexpr int64_t no_stream = -1;
// As floating-point numbers of whatever size, memory of this byte is NaN.
constexpr int nan_byte = 0xFF;

struct Block {
  char* data;
  size_t size; // of the memory
  size_t used; // of the tensor, rounded
  int64_t home; // the stream that it belongs to
  std::set<int64_t> users; // other streams that were recorded
  History history;
  // After it was given back: what has to end before it can be used again, and the clock when it has.
  std::vector<std::pair<StreamQueue*, uint64_t>> awaited;
  VectorClock ended;
};

class CachingPool {
 public:
  using Rounding = size_t (*)(size_t);

  CachingPool(Rounding rounding, bool takes_larger) : rounding_(rounding), takes_larger_(takes_larger) {}

  void* allocate(size_t size, int64_t home) {
    const size_t rounded = rounding_(size);
    if (void* data = try_to_allocate(rounded, home)) {
      return data;
    }
    empty_cache();
    if (void* data = try_to_allocate(rounded, home)) {
      return data;
    }
    std::lock_guard<std::mutex> lock(order_mutex);
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "emulated device out of memory. Tried to allocate ", rounded, " bytes; ", live_,
        " of ", limit_, " bytes are in use");
  }

  void free(void* data) {
    std::lock_guard<std::mutex> lock(order_mutex);
    const auto found = blocks_.find(static_cast<char*>(data));
    if (found == blocks_.end()) {
      return;
    }
    Block& block = *found->second;
    live_ -= block.used;
    block.used = 0;
    block.history.end_tenancy();
    for (const int64_t user : block.users) {
      StreamQueue& stream = Streams::get(user);
      block.awaited.emplace_back(&stream, stream.newest());
      block.ended.merge(stream.clock);
    }
    block.users.clear();
    if (block.awaited.empty()) {
      cached_[block.home].emplace(block.size, &block);
    } else {
      waiting_.push_back(&block);
    }
  }

  void record_stream(const void* data, int64_t stream) {
    std::lock_guard<std::mutex> lock(order_mutex);
    Block* block = find(data);
    if (block != nullptr && stream != block->home) {
      block->users.insert(stream);
    }
  }

  // The block in which an address lies, or nullptr. Guarded by order_mutex.
  Block* find(const void* address) {
    const char* searched = static_cast<const char*>(address);
    auto after = blocks_.upper_bound(const_cast<char*>(searched));
    if (after == blocks_.begin()) {
      return nullptr;
    }
    Block* block = std::prev(after)->second.get();
    return searched < block->data + block->size ? block : nullptr;
  }

  // Takes memory that the program has made itself for memory of this pool, until `disown`.
  void adopt(void* data, size_t size) {
    std::lock_guard<std::mutex> lock(order_mutex);
    auto block = std::make_unique<Block>();
    block->data = static_cast<char*>(data);
    block->size = block->used = size;
    block->home = no_stream;
    live_ += size;
    peak_ = std::max(peak_, live_);
    blocks_[block->data] = std::move(block);
  }

  void disown(void* data) {
    std::lock_guard<std::mutex> lock(order_mutex);
    const auto found = blocks_.find(static_cast<char*>(data));
    TORCH_CHECK(found != blocks_.end(), "found no host memory that was registered at this address");
    live_ -= found->second->used;
    blocks_.erase(found);
  }

  bool contains(const void* address) {
    std::lock_guard<std::mutex> lock(order_mutex);
    return find(address) != nullptr;
  }

  // Gives back what is kept for later use.
  void empty_cache() {
    // Unlike blocks that are used again, memory that is given back to the system must not be used by any stream, also
    // not by one that uses it by mistake. The host's clock learns nothing of this wait: no program may count on it.
    std::unique_lock<std::mutex> lock(order_mutex);
    while (!are_idle()) { // also after a wait: another thread may have queued work, and given back what that uses
      lock.unlock();
      for (StreamQueue* stream : Streams::list()) {
        stream->wait(stream->newest());
      }
      lock.lock();
    }
    reclaim();
    for (auto& [home, by_size] : cached_) {
      for (auto& [size, block] : by_size) {
        reserved_ -= size;
        std::free(block->data);
        blocks_.erase(block->data);
      }
    }
    cached_.clear();
  }

  void set_limit(size_t limit) {
    std::lock_guard<std::mutex> lock(order_mutex);
    limit_ = limit;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(order_mutex);
    peak_ = live_;
  }

  size_t live() const {
    std::lock_guard<std::mutex> lock(order_mutex);
    return live_;
  }

  size_t peak() const {
    std::lock_guard<std::mutex> lock(order_mutex);
    return peak_;
  }

  size_t reserved() const {
    std::lock_guard<std::mutex> lock(order_mutex);
    return reserved_;
  }

 private:
  // Whether all that is queued has ended. Under order_mutex, without which nothing is queued.
  static bool are_idle() {
    const std::vector<StreamQueue*> streams = Streams::list();
    return std::all_of(streams.begin(), streams.end(), [](StreamQueue* stream) {
      return stream->is_done(stream->newest());
    });
  }

  void* try_to_allocate(size_t size, int64_t home) {
    std::lock_guard<std::mutex> lock(order_mutex);
    reclaim();
    Block* block = take_cached(size, home);
    if (block == nullptr) {
      if (size > limit_ - std::min(limit_, reserved_)) {
        return nullptr;
      }
      block = make(size, home);
    }
    block->used = size;
    live_ += size;
    peak_ = std::max(peak_, live_);
    return block->data;
  }

  // Moves blocks whose recorded streams are done with them to those that can be used again.
  void reclaim() {
    for (auto position = waiting_.begin(); position != waiting_.end();) {
      Block& block = **position;
      const bool is_done = std::all_of(block.awaited.begin(), block.awaited.end(), [](const auto& awaited) {
        return awaited.first->is_done(awaited.second);
      });
      if (!is_done) {
        ++position;
        continue;
      }
      block.history.forget(block.ended);
      block.awaited.clear();
      block.ended = {};
      cached_[block.home].emplace(block.size, &block);
      position = waiting_.erase(position);
    }
  }

  Block* take_cached(size_t size, int64_t home) {
    auto& by_size = cached_[home];
    const auto found = by_size.lower_bound(size);
    if (found == by_size.end() || found->first > (takes_larger_ ? size + size / 4 : size)) {
      return nullptr;
    }
    Block* block = found->second;
    by_size.erase(found);
    return block;
  }

  Block* make(size_t size, int64_t home) {
    void* data = nullptr;
    if (posix_memalign(&data, 512, size) != 0) {
      throw std::bad_alloc();
    }
    std::memset(data, nan_byte, size);
    auto block = std::make_unique<Block>();
    block->data = static_cast<char*>(data);
    block->size = size;
    block->home = home;
    reserved_ += size;
    return (blocks_[block->data] = std::move(block)).get();
  }

  const Rounding rounding_;
  const bool takes_larger_;
  std::map<char*, std::unique_ptr<Block>> blocks_;
  std::map<int64_t, std::multimap<size_t, Block*>> cached_; // by home
  std::list<Block*> waiting_;
  size_t limit_ = std::numeric_limits<size_t>::max();
  size_t live_ = 0, peak_ = 0, reserved_ = 0;
};

inline size_t round_to_512(size_t size) {
  return (size + 511) / 512 * 512;
}

inline size_t round_to_power_of_two(size_t size) {
  size_t rounded = 1;
  while (rounded < size) {
    rounded *= 2;
  }
  return rounded;
}

inline CachingPool& device_pool() {
  static auto* pool = new CachingPool(round_to_512, true);
  return *pool;
}

inline CachingPool& pinned_pool() {
  static auto* pool = new CachingPool(round_to_power_of_two, false);
  return *pool;
}

inline void free_device(void* data) {
  device_pool().free(data);
}

inline void free_pinned(void* data) {
  pinned_pool().free(data);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size == 0 ? nullptr : device_pool().allocate(size, current_stream_number);
    return {data, data, &free_device, the_device};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_device;
  }
  void copy_data(void*, const void*, size_t) const override {
    TORCH_CHECK(false, "the emulated device cannot clone memory outside of a stream");
  }
};

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* data = size == 0 ? nullptr : pinned_pool().allocate(size, no_stream);
    return {data, data, &free_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    std::memcpy(to, from, size);
  }
};

inline DeviceAllocator device_allocator;
inline PinnedAllocator pinned_allocator;

} // namespace emulated
