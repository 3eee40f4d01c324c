// The shapes of results that were found once: operators are called again and again with tensors of the same shapes.
// Copyright 2026 The accelerate_lshdp authors. Licensed under the Apache License, Version 2.0.
//
// torch finds many shapes by programs in Python, which take far longer than the operators of small models themselves.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

namespace emulated {

// What was found: shapes of the results, and of the arguments that are written to, as tensors without data. If they are
// not known, the operator has to run first.
struct Shapes {
  bool are_known = false;
  std::vector<c10::IValue> results;
  std::vector<c10::IValue> arguments;
};

// All that the shapes of an operator's results depend on, as text. Numbers are a part of it, as sizes are numbers.
class ShapeKey {
 public:
  ShapeKey(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
    text_ = op.operator_name().name + "/" + op.operator_name().overload_name;
    add(static_cast<int64_t>(c10::typeMetaToScalarType(c10::get_default_dtype())));
    for (const c10::IValue& argument : arguments) {
      add(argument);
    }
  }

  // None: there are arguments of a type that is not expected.
  std::optional<std::string> text() const {
    return is_complete_ ? std::optional<std::string>(text_) : std::nullopt;
  }

 private:
  template <typename Number>
  void add_bytes(char type, const Number& number) {
    text_ += type;
    text_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }

  void add(int64_t number) { add_bytes('i', number); }

  void add(c10::IntArrayRef numbers) {
    add(static_cast<int64_t>(numbers.size()));
    for (const int64_t number : numbers) {
      add(number);
    }
  }

  void add(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      text_ += 'u';
      return;
    }
    text_ += 't';
    add(static_cast<int64_t>(tensor.scalar_type()));
    add(static_cast<int64_t>(tensor.device().type()));
    // Numbers that became tensors have less to say about the type of a result.
    add(static_cast<int64_t>(tensor.unsafeGetTensorImpl()->is_wrapped_number()));
    add(tensor.sizes());
    add(tensor.strides());
  }

  void add(const c10::IValue& value) {
    if (value.isTensor()) {
      add(value.toTensor());
    } else if (value.isNone()) {
      text_ += 'n';
    } else if (value.isInt()) {
      add(value.toInt());
    } else if (value.isDouble()) {
      add_bytes('d', value.toDouble());
    } else if (value.isBool()) {
      add_bytes('b', value.toBool());
    } else if (value.isDevice()) {
      add_bytes('v', value.toDevice().type());
    } else if (value.isString()) {
      text_ += 's';
      add(static_cast<int64_t>(value.toStringRef().size()));
      text_ += value.toStringRef();
    } else if (value.isList()) {
      const auto list = value.toListRef();
      text_ += 'l';
      add(static_cast<int64_t>(list.size()));
      for (const c10::IValue& item : list) {
        add(item);
      }
    } else {
      is_complete_ = false;
    }
  }

  std::string text_;
  bool is_complete_ = true;
};

class ShapeCache {
 public:
  // The shapes for a call, from `find` if there was none like it.
  template <typename Find>
  Shapes of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments, Find&& find) {
    const std::optional<std::string> key = ShapeKey(op, arguments).text();
    if (!key.has_value()) {
      return find();
    }
    {
      std::lock_guard<std::mutex> lock(mutex_);
      const auto found = shapes_.find(*key);
      if (found != shapes_.end()) {
        return found->second;
      }
    }
    // Without the lock: Python may run, and another thread that waits for the lock may have its own.
    const Shapes shapes = find();
    std::lock_guard<std::mutex> lock(mutex_);
    if (shapes_.size() >= most_entries) {
      shapes_.clear(); // of programs with ever new numbers
    }
    return shapes_.emplace(*key, shapes).first->second;
  }

 private:
  static constexpr size_t most_entries = 20000;
  std::mutex mutex_;
  std::unordered_map<std::string, Shapes> shapes_;
};

} // namespace emulated
