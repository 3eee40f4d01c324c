// Collectives of the device: gloo's, each group on streams of its own, ordered as NCCL's are.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// A collective waits for what the current stream has been given so far. What the current stream is given later does
// not wait for the collective, until `wait` of its work. gloo computes on the memory of the device meanwhile, in the
// thread of the group's stream. Until then, the work keeps the tensors.
//
// Sending and receiving have a stream each: two ranks that both send first and then receive would wait for each other
// otherwise, as a message of gloo's ends when it was received.
#pragma once

#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "aliases.h"
#include "events.h"
#include "work.h"

namespace emulated {

class CollectiveWork final : public c10d::Work {
 public:
  CollectiveWork(StreamQueue& stream, std::vector<at::Tensor> used, std::vector<at::Tensor> results)
      : used_(std::move(used)), results_(std::move(results)) {
    record(end_, stream);
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{the_device});
    // It is complete for the host: who waits for it lets the current stream wait for the group's.
    const c10::StreamGuard guard(Guard::as_stream(stream.number));
    future_->markCompleted(c10::IValue(results_));
  }

  bool isCompleted() override {
    return has_ended(end_);
  }
  bool isSuccess() const override {
    return true;
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    let_wait(current_stream(), end_);
    used_.clear();
  }
  std::vector<at::Tensor> result() override {
    return results_;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    return future_;
  }

 private:
  Event end_;
  std::vector<at::Tensor> used_, results_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What leads to the other ranks: collectives of all groups share it.
struct Link {
  std::mutex busy;

  void send(double bytes) {
    const double rate = settings.link_bandwidth;
    if (rate > 0 && bytes > 0) {
      std::lock_guard<std::mutex> lock(busy);
      sleep_for(bytes / rate);
    }
  }
};

inline Link& link_to_ranks() {
  static auto* link = new Link;
  return *link;
}

class DeviceBackend final : public c10d::Backend {
 public:
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  explicit DeviceBackend(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()),
        gloo_(std::move(gloo)),
        stream_(Streams::make()),
        send_stream_(Streams::make()),
        receive_stream_(Streams::make()) {}

  const std::string getBackendName() const override {
    return "emulated_gloo";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return gloo_->getBackendOptions();
  }
  void setTimeout(std::chrono::milliseconds timeout) override {
    gloo_->setTimeout(timeout);
  }
  void abort() override {
    gloo_->abort();
  }
  void shutdown() override {
    gloo_->shutdown();
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return queue(
        "all_reduce", {}, tensors, 2 * share() * bytes_of(tensors),
        [gloo = gloo_, all = aliases(tensors), options]() mutable { return gloo->allreduce(all, options); });
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return queue(
        "broadcast", {}, tensors, bytes_of(tensors),
        [gloo = gloo_, all = aliases(tensors), options]() mutable { return gloo->broadcast(all, options); });
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return queue(
        "reduce", {}, tensors, bytes_of(tensors),
        [gloo = gloo_, all = aliases(tensors), options]() mutable { return gloo->reduce(all, options); });
  }

  WorkPointer allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    Tensors written;
    std::vector<Tensors> gathered;
    for (const Tensors& output : outputs) {
      written.insert(written.end(), output.begin(), output.end());
      gathered.push_back(aliases(output));
    }
    return queue(
        "all_gather", inputs, written, share() * bytes_of(written),
        [gloo = gloo_, gathered, sent = aliases(inputs), options]() mutable {
          return gloo->allgather(gathered, sent, options);
        });
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return queue(
        "all_gather", {input}, {output}, share() * bytes_of({output}),
        [gloo = gloo_, to = aliases({output}), from = aliases({input}), options]() mutable {
          return gloo->_allgather_base(to[0], from[0], options);
        });
  }

  WorkPointer allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return queue(
        "all_gather", inputs, outputs, share() * bytes_of(outputs),
        [gloo = gloo_, to = aliases(outputs), from = aliases(inputs), options]() mutable {
          return gloo->allgather_into_tensor_coalesced(to, from, options);
        });
  }

  WorkPointer reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    Tensors read;
    std::vector<Tensors> sent;
    for (const Tensors& input : inputs) {
      read.insert(read.end(), input.begin(), input.end());
      sent.push_back(aliases(input));
    }
    return queue(
        "reduce_scatter", read, outputs, share() * bytes_of(read),
        [gloo = gloo_, to = aliases(outputs), sent, options]() mutable {
          return gloo->reduce_scatter(to, sent, options);
        });
  }

  WorkPointer _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return queue(
        "reduce_scatter", {input}, {output}, share() * bytes_of({input}),
        [gloo = gloo_, to = aliases({output}), from = aliases({input}), options]() mutable {
          return gloo->_reduce_scatter_base(to[0], from[0], options);
        });
  }

  WorkPointer alltoall_base(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes, std::vector<int64_t>& input_sizes,
      const c10d::AllToAllOptions& options) override {
    return queue(
        "all_to_all", {input}, {output}, share() * bytes_of({input}),
        [gloo = gloo_, to = aliases({output}), from = aliases({input}), output_sizes, input_sizes, options]() mutable {
          return gloo->alltoall_base(to[0], from[0], output_sizes, input_sizes, options);
        });
  }

  WorkPointer alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    return queue(
        "all_to_all", inputs, outputs, share() * bytes_of(inputs),
        [gloo = gloo_, to = aliases(outputs), from = aliases(inputs), options]() mutable {
          return gloo->alltoall(to, from, options);
        });
  }

  WorkPointer send(Tensors& tensors, int target, int tag) override {
    return queue_on(
        send_stream_, "send", tensors, {}, bytes_of(tensors),
        [gloo = gloo_, all = aliases(tensors), target, tag]() mutable { return gloo->send(all, target, tag); });
  }

  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    return queue_on(
        receive_stream_, "receive", {}, tensors, 0,
        [gloo = gloo_, all = aliases(tensors), source, tag]() mutable { return gloo->recv(all, source, tag); });
  }

  // The host waits here, as with NCCL.
  WorkPointer barrier(const c10d::BarrierOptions& options) override {
    wait_for_device();
    return gloo_->barrier(options);
  }

 private:
  static Tensors aliases(const Tensors& tensors) {
    Aliases made;
    Tensors result;
    for (const at::Tensor& tensor : tensors) {
      TORCH_CHECK(is_on_device(tensor), "found a tensor on ", tensor.device(), ", expected one on ", the_device);
      result.push_back(made.of(tensor));
    }
    return result;
  }

  // The part of a payload that a rank sends in a ring.
  double share() const {
    return (getSize() - 1) / static_cast<double>(getSize());
  }

  static double bytes_of(const Tensors& tensors) {
    double bytes = 0;
    for (const at::Tensor& tensor : tensors) {
      bytes += static_cast<double>(tensor.nbytes());
    }
    return bytes;
  }

  template <typename Start>
  WorkPointer queue(
      const std::string& name, const Tensors& read, const Tensors& written, double sent_bytes, Start start) {
    return queue_on(stream_, name, read, written, sent_bytes, std::move(start));
  }

  template <typename Start>
  WorkPointer queue_on(
      StreamQueue& stream, const std::string& name, const Tensors& read, const Tensors& written, double sent_bytes,
      Start start) {
    Event begin;
    record(begin, current_stream());
    let_wait(stream, begin);
    std::vector<Access> accesses;
    Tensors used;
    for (const at::Tensor& tensor : read) {
      accesses.push_back(access_of(tensor, false));
      used.push_back(tensor);
    }
    for (const at::Tensor& tensor : written) {
      accesses.push_back(access_of(tensor, true));
      used.push_back(tensor);
    }
    enqueue(stream, accesses, name, [sent_bytes, start = std::move(start)]() mutable {
      sleep_for(settings.collective_delay);
      link_to_ranks().send(sent_bytes);
      const WorkPointer work = start();
      if (work) {
        work->wait();
      }
    });
    return c10::make_intrusive<CollectiveWork>(stream, std::move(used), written);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  StreamQueue& stream_;
  StreamQueue& send_stream_;
  StreamQueue& receive_stream_;
};

} // namespace emulated
