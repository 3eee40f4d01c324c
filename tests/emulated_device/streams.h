// Streams: each is a thread that does what was queued on it, one after the other.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "clocks.h"
#include "settings.h"

namespace emulated {

// Whether this thread is one of a stream.
inline thread_local bool is_stream_thread = false;

// The first error of work on any stream: like CUDA's, it is raised where the host waits next.
inline std::mutex error_mutex;
inline std::string first_error;

class StreamQueue {
 public:
  explicit StreamQueue(int64_t number) : number(number) {
    // Never joined, as queues live as long as the process.
    std::thread([this] { run(); }).detach();
  }

  const int64_t number;
  VectorClock clock; // of what is queued next; guarded by order_mutex

  // Returns the number that `wait` takes.
  uint64_t push(std::function<void()> task) {
    std::lock_guard<std::mutex> lock(mutex_);
    tasks_.push_back(std::move(task));
    pushed_.notify_one();
    return ++newest_;
  }

  uint64_t newest() {
    std::lock_guard<std::mutex> lock(mutex_);
    return newest_;
  }

  bool is_done(uint64_t ticket) {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  void wait(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [&] { return done_ >= ticket; });
  }

 private:
  void run() {
    is_stream_thread = true;
    for (;;) {
      std::function<void()> task;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        pushed_.wait(lock, [&] { return !tasks_.empty(); });
        task = std::move(tasks_.front());
        tasks_.pop_front();
      }
      try {
        task();
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(error_mutex);
        if (first_error.empty()) {
          first_error = error.what();
        }
      }
      task = nullptr; // before others go on, who may count on what it holds being released
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++done_;
      }
      finished_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable pushed_, finished_;
  std::deque<std::function<void()>> tasks_;
  uint64_t newest_ = 0, done_ = 0;
};

// All streams, by number; 0 is the default stream. Never destroyed: their threads run until the process ends.
class Streams {
 public:
  static StreamQueue& get(int64_t number) {
    std::lock_guard<std::mutex> lock(mutex());
    return *all().at(number);
  }

  static StreamQueue& make() {
    std::lock_guard<std::mutex> lock(mutex());
    all().push_back(new StreamQueue(static_cast<int64_t>(all().size())));
    return *all().back();
  }

  static std::vector<StreamQueue*> list() {
    std::lock_guard<std::mutex> lock(mutex());
    return all();
  }

 private:
  static std::mutex& mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }

  static std::vector<StreamQueue*>& all() {
    static auto* all = new std::vector<StreamQueue*>{new StreamQueue(0)};
    return *all;
  }
};

inline thread_local int64_t current_stream_number = 0;

inline StreamQueue& current_stream() {
  return Streams::get(current_stream_number);
}

inline void raise_first_error() {
  std::string error;
  {
    std::lock_guard<std::mutex> lock(error_mutex);
    error.swap(first_error);
  }
  TORCH_CHECK(error.empty(), "work on a stream of the emulated device has failed: ", error);
}

// The host waits for all that is queued on a stream by now.
inline void wait_on_host(StreamQueue& stream) {
  uint64_t ticket = 0;
  VectorClock reached;
  {
    std::lock_guard<std::mutex> lock(order_mutex);
    ticket = stream.newest();
    reached = stream.clock;
  }
  stream.wait(ticket);
  {
    std::lock_guard<std::mutex> lock(order_mutex);
    host_clock.merge(reached);
  }
  raise_first_error();
}

inline void wait_for_device() {
  ++counters.host_synchronisations;
  for (StreamQueue* stream : Streams::list()) {
    wait_on_host(*stream);
  }
}

inline void sleep_for(double seconds) {
  if (seconds > 0) {
    std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  }
}

} // namespace emulated
