// Operators that make tensors of the device or change their shape, without a look at their data.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>

#include <cstring>
#include <optional>

#include "allocator.h"
#include "work.h"

namespace emulated {

inline at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}

inline at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype));
}

// Gives a storage memory of another size, with what fits of its data.
inline void resize_storage(const c10::Storage& storage, size_t size) {
  c10::StorageImpl* impl = storage.unsafeGetStorageImpl();
  c10::DataPtr memory = device_allocator.allocate(size);
  const size_t kept = std::min(size, impl->nbytes());
  if (kept > 0) {
    const auto* from = static_cast<const char*>(impl->data());
    auto* to = static_cast<char*>(memory.get());
    StreamQueue& stream = current_stream();
    enqueue(
        stream, {{from, from + kept, false}, {to, to + kept, true}}, "resize_",
        [from, to, kept] { std::memcpy(to, from, kept); });
    device_pool().record_stream(from, stream.number); // it is given back below, before the copy
  }
  impl->set_data_ptr_noswap(std::move(memory));
  impl->set_nbytes(size);
}

inline const at::Tensor& resize(
    const at::Tensor& tensor, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (tensor.sizes() == size) {
    return tensor;
  }
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) {
    impl->empty_tensor_restride(*format);
  }
  const size_t needed = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize();
  if (tensor.numel() > 0 && needed > tensor.storage().nbytes()) {
    resize_storage(tensor.storage(), needed);
  }
  return tensor;
}

inline at::Tensor& set_storage_and_shape(
    at::Tensor& tensor, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return tensor;
}

inline at::Tensor& set_tensor(at::Tensor& tensor, const at::Tensor& source) {
  return set_storage_and_shape(tensor, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

inline at::Tensor& set_storage(at::Tensor& tensor, at::Storage storage) {
  const auto length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_storage_and_shape(tensor, std::move(storage), 0, {length}, {});
}

inline void record_stream(at::Tensor& tensor, at::Stream stream) {
  device_pool().record_stream(tensor.storage().data(), stream.id());
}

// `parameter.data = ` moves a parameter between the host and the device. torch allows it for the devices that it knows.
inline bool has_compatible_shallow_copy_type(const at::Tensor& tensor, const at::Tensor& from) {
  return tensor.layout() == at::kStrided && from.layout() == at::kStrided;
}

} // namespace emulated
