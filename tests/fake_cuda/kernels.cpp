// Operations of the fake device: the processor's own kernels on the same bytes, as work of the current stream.
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include <set>

#include "device.h"

namespace fake {
namespace {

using at::Tensor;
using torch::jit::Stack;

Bytes bytes_of(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return {nullptr, nullptr};
  int64_t last = 0;
  for (int64_t axis = 0; axis < tensor.dim(); axis++) last += (tensor.size(axis) - 1) * tensor.stride(axis);
  const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
  return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// A number of Python as a tensor does not decide the type of a result.
void keep_number(const Tensor& made, const Tensor& like) {
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
}

// The same bytes as a tensor of the processor, which keeps nothing alive.
Tensor on_host(const Tensor& tensor) {
  static char nowhere[64];
  void* place = tensor.numel() ? const_cast<void*>(tensor.const_data_ptr()) : nowhere;
  auto view = at::from_blob(
      place, tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kCPU));
  keep_number(view, tensor);
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

Tensor meta_like(const Tensor& tensor) {
  return at::empty_strided(
      tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()).device(at::kMeta));
}

Tensor device_like(const Tensor& tensor) {
  return at::detail::empty_strided_generic(
      tensor.sizes(), tensor.strides(), device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
      tensor.scalar_type());
}

template <typename Change>
void change_tensors(c10::IValue& value, const Change& change) {
  if (value.isTensor()) {
    value = change(value.toTensor());
  } else if (value.isTensorList()) {
    std::vector<Tensor> changed;
    for (const Tensor& each : value.toTensorVector()) changed.push_back(change(each));
    value = changed;
  } else if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> changed;
    for (const std::optional<Tensor>& each : value.toOptionalTensorList())
      changed.push_back(each ? std::optional<Tensor>(change(*each)) : each);
    value = changed;
  }
}

// Runs an operation on tensors of the processor, with random numbers of a seed of its own.
void run_on_host(const c10::OperatorHandle& op, Stack& stack, std::optional<uint64_t> seed) {
  c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
  at::AutoDispatchBelowADInplaceOrView below;
  if (!seed) {
    op.callBoxed(stack);
    return;
  }
  const auto& arguments = op.schema().arguments();
  for (size_t place = 0; place < arguments.size(); place++)
    if (arguments[place].name() == "generator") {
      stack[stack.size() - arguments.size() + place] = at::detail::createCPUGenerator(*seed);
      op.callBoxed(stack);
      return;
    }
  const auto& generator = at::detail::getDefaultCPUGenerator();
  auto state = generator.get_state();
  const_cast<at::Generator&>(generator).set_current_seed(*seed);
  op.callBoxed(stack);
  const_cast<at::Generator&>(generator).set_state(state);
}

const std::set<std::string> kWithWorkspace{
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_overrideable", "convolution_backward",
    "convolution_backward_overrideable"};
constexpr size_t kWorkspaceBytes = 1 << 20;

// As cuBLAS and cuDNN, whose workspaces come from the allocator with the first use on a stream, and stay.
void take_workspace(int slot) {
  static auto* taken = new std::map<int, c10::DataPtr>;
  if (!taken->count(slot)) taken->emplace(slot, device_allocator()->allocate(kWorkspaceBytes));
}

// One operation: its tensors on the device, and the same as the processor sees them.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), schema_(op.schema()), name_(schema_.name().substr(schema_.name().find("::") + 2)) {
    given_.assign(stack->end() - static_cast<int64_t>(schema_.arguments().size()), stack->end());
    {
      Locked locked(device().lock);
      is_captured_ = device().graphs.is_capturing(current_slot());
    }
    if (!op.hasTag(at::Tag::nondeterministic_seeded)) return;
    for (const auto& value : given_)
      if (value.isGenerator()) generator_ = value.toGenerator();
    draws_ = true;
    if (!is_captured_) seed_ = next_seed(generator_);
  }

  void run() {
    const bool tells_host = returns_a_value() || op_.hasTag(at::Tag::dynamic_output_shape) ||
                            op_.hasTag(at::Tag::data_dependent_output);
    if ((device().streams.is_late() || is_captured_) && !tells_host && run_later()) return;
    if (is_captured_) {
      Locked locked(device().lock);
      device().refuse_on_captured_stream(current_slot(), name_);
    }
    run_now(tells_host);
  }

 private:
  struct Pair {
    Tensor device, host;
    bool writes;
  };
  static std::set<std::string>& without_meta() {  // operations that cannot be tried without data
    static auto* names = new std::set<std::string>{"_linalg_svd", "histc", "_embedding_bag"};
    return *names;
  }

  bool returns_a_value() const {
    for (const auto& each : schema_.returns())
      if (each.type()->kind() != c10::TypeKind::TensorType && each.type()->kind() != c10::TypeKind::ListType)
        return true;
    return false;
  }

  // Makes arguments for the processor; a tensor of its own is read now if the work is to be done later.
  Stack on_host_stack(bool is_later) {
    Stack host = given_;
    pairs_.clear();
    for (size_t place = 0; place < host.size(); place++) {
      const auto* alias = schema_.arguments()[place].alias_info();
      const bool writes = alias && alias->isWrite();
      change_tensors(host[place], [&](const Tensor& tensor) {
        if (!tensor.defined()) return tensor;
        if (!tensor.is_cuda()) return is_later ? copied(tensor) : tensor;
        Tensor view = writes && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : on_host(tensor);
        pairs_.push_back({tensor, view, writes});
        return view;
      });
      if (host[place].isDevice() && host[place].toDevice().is_cuda()) host[place] = c10::Device(c10::kCPU);
    }
    return host;
  }

  static Tensor copied(const Tensor& tensor) {
    auto made = tensor.clone();
    keep_number(made, tensor);
    return made;
  }

  int begin() {
    auto& all = device();
    const int slot = current_slot();
    if (kWithWorkspace.count(name_)) take_workspace(slot);
    if (is_captured_) return slot;
    all.order.begin_work(slot);
    all.counts["kernels"]++;
    for (const Pair& pair : pairs_) all.order.access(slot, bytes_of(pair.device), pair.writes, name_);
    return slot;
  }

  void finish(Stack results) {
    stack_->resize(stack_->size() - schema_.arguments().size());
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  void run_now(bool tells_host) {
    auto& all = device();
    Stack host = on_host_stack(false);
    int slot = 0;
    {
      Locked locked(all.lock);
      slot = begin();
      if (all.streams.is_late()) {
        all.counts["at once: " + name_]++;
        all.streams.run_until(all.streams.end_of(slot));
      }
    }
    run_on_host(op_, host, seed_);
    for (const Pair& pair : pairs_)
      if (pair.writes && !pair.device.sizes().equals(pair.host.sizes())) {
        pair.device.resize_(pair.host.sizes());
        if (pair.host.numel()) on_host(pair.device).copy_(pair.host);
        wrote(slot, pair.device);
      }
    for (auto& value : host) change_tensors(value, [&](const Tensor& result) { return adopted(slot, result); });
    if (tells_host) {
      Locked locked(all.lock);
      all.host_waits_for(all.streams.end_of(slot), all.order.clock(slot), name_.c_str());
    }
    finish(std::move(host));
  }

  // As cuDNN, which has no kernels of float64 in channels_last.
  Tensor made_like(const Tensor& result) const {
    const bool has_own_format = result.scalar_type() == at::kDouble && name_.starts_with("convolution");
    return device_like(has_own_format ? at::empty(result.sizes(), result.options().device(at::kMeta)) : result);
  }

  void wrote(int slot, const Tensor& tensor) {
    Locked locked(device().lock);
    device().order.access(slot, bytes_of(tensor), true, name_);
  }

  // The tensor of the device for a result of the processor: the one that was given, a view of it, or a new one.
  Tensor adopted(int slot, const Tensor& result) {
    if (!result.defined() || result.is_cuda()) return result;
    for (const Pair& pair : pairs_)
      if (pair.host.is_same(result)) return pair.device;
    for (const Pair& pair : pairs_)
      if (result.numel() && result.has_storage() && result.storage().data() == pair.host.storage().data())
        return at::native::as_strided_tensorimpl(
            pair.device, result.sizes(), result.strides(), pair.device.storage_offset() + result.storage_offset());
    Tensor made = made_like(result);
    if (result.numel()) on_host(made).copy_(result);
    wrote(slot, made);
    return made;
  }

  // Posts the operation, with outputs of the shapes that torch derives without data; false if it cannot be.
  bool run_later() {
    if (without_meta().count(name_)) return false;
    Stack meta = given_;
    std::vector<std::pair<Tensor, Tensor>> seen;  // of the device, without data
    for (auto& value : meta) {
      change_tensors(value, [&](const Tensor& tensor) {
        if (!tensor.defined() || (tensor.is_cpu() && !tensor.dim())) return tensor;  // a number
        for (const auto& [known, made] : seen)
          if (known.is_same(tensor)) return made;
        seen.emplace_back(tensor, meta_like(tensor));
        return seen.back().second;
      });
      if (value.isDevice()) value = c10::Device(c10::kMeta);
      if (value.isGenerator()) value = c10::IValue();
    }
    try {
      c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
      at::AutoDispatchBelowADInplaceOrView below;
      op_.callBoxed(meta);
    } catch (const std::exception&) {
      without_meta().insert(name_);  // an error of the arguments is raised by the run that follows
      return false;
    }
    if (name_ == "native_batch_norm") give_own_statistics(meta);
    for (const auto& [tensor, made] : seen)
      if (tensor.is_cuda() && !tensor.sizes().equals(made.sizes())) tensor.resize_(made.sizes());
    Stack host = on_host_stack(true);
    std::vector<Tensor> targets;
    for (auto& value : meta)
      change_tensors(value, [&](const Tensor& result) {
        targets.emplace_back();
        if (!result.defined()) return result;
        for (const auto& [tensor, made] : seen) {
          if (made.is_same(result)) return tensor;
          if (made.has_storage() && result.has_storage() && made.storage().is_alias_of(result.storage()))
            return at::native::as_strided_tensorimpl(
                tensor, result.sizes(), result.strides(), tensor.storage_offset() + result.storage_offset());
        }
        Tensor made = made_like(result);
        targets.back() = on_host(made);
        new_.push_back(made);
        return made;
      });
    post(std::move(host), std::move(targets));
    finish(std::move(meta));
    return true;
  }

  // The processor keeps mean and deviation in the type of the weights, where CUDA and torch's derivation use 32 bits,
  // and keeps none if it uses running statistics.
  void give_own_statistics(Stack& results) const {
    const auto& weight = given_[1].isTensor() && given_[1].toTensor().defined() ? given_[1].toTensor() : given_[0].toTensor();
    const bool is_training = given_[5].toBool();
    for (size_t place : {1, 2})
      if (results[place].isTensor() && results[place].toTensor().defined())
        results[place] = at::empty({is_training ? given_[0].toTensor().size(1) : 0}, weight.options().device(at::kMeta));
  }

  void post(Stack host, std::vector<Tensor> targets) {
    auto& all = device();
    Locked locked(all.lock);
    const int slot = begin();
    // a replay runs this again: the arguments stay
    auto run = [op = op_, name = name_, host = std::move(host),
                targets = std::move(targets)](std::optional<uint64_t> seed) {
      Stack results = host;
      run_on_host(op, results, seed);
      size_t place = 0;
      for (auto& value : results)
        change_tensors(value, [&](const Tensor& result) {
          const Tensor& target = targets.at(place++);
          if (target.defined() && result.defined() && result.numel()) {  // some of the processor's are left out
            TORCH_CHECK(target.sizes().equals(result.sizes()), name, " has made another shape than was derived");
            target.copy_(result);
          }
          return result;
        });
    };
    if (is_captured_) {
      Captured captured{name_, {}, std::move(run), {}};
      for (const Pair& pair : pairs_) captured.accesses.push_back({bytes_of(pair.device), pair.writes});
      for (const Tensor& made : new_) captured.accesses.push_back({bytes_of(made), true});
      if (draws_) captured.draw = [generator = generator_] { return next_seed(generator); };
      all.graphs.add(std::move(captured));
      return;
    }
    for (const Tensor& made : new_) all.order.access(slot, bytes_of(made), true, name_);
    all.streams.post(slot, [run = std::move(run), seed = seed_] { run(seed); });
  }

  const c10::OperatorHandle op_;
  Stack* stack_;
  const c10::FunctionSchema& schema_;
  const std::string name_;
  Stack given_;
  std::vector<Pair> pairs_;
  std::vector<Tensor> new_;
  std::optional<at::Generator> generator_;
  std::optional<uint64_t> seed_;
  bool draws_ = false, is_captured_ = false;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device>,
    std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(
      size, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(
      size, stride, device_allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

// A storage that grows is copied by the processor, after what is still to be written to it.
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  if (self.storage().nbytes()) {
    Locked locked(device().lock);
    device().refuse_on_captured_stream(current_slot(), "resize_ of memory in use");
    device().streams.run_until(device().streams.end_of(current_slot()));
  }
  return at::native::resize_(self, size, format);
}

// Copies between host and device: at once for the host if its memory is not pinned, or if it asks for that.
Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  auto& all = device();
  const bool to_device = self.is_cuda(), from_device = source.is_cuda(), crosses = to_device != from_device;
  if (!self.numel()) return self;
  Tensor to = to_device ? on_host(self) : self, from = from_device ? on_host(source) : source;
  Locked locked(all.lock);
  const int slot = current_slot();
  const bool is_captured = all.graphs.is_capturing(slot);
  const Tensor& on_the_host = to_device ? source : self;
  const bool is_pinned = crosses && all.order.is_pinned(on_the_host.const_data_ptr());
  const bool waits = crosses && !(non_blocking && (is_pinned || to_device));
  if (is_captured && crosses && !(is_pinned && non_blocking)) all.refuse_on_captured_stream(slot, "a copy that waits");
  if ((all.streams.is_late() || is_captured) && crosses) {
    if (is_pinned) {
      (to_device ? from : to) = on_host(on_the_host);
    } else if (to_device) {
      from = source.clone();  // CUDA takes pageable memory before it returns
    }
  }
  auto run = [to, from](std::optional<uint64_t>) mutable {
    c10::impl::ExcludeDispatchKeyGuard without(c10::autocast_dispatch_keyset);
    at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  };
  if (is_captured) {
    all.graphs.add({"copy", {{bytes_of(source), false}, {bytes_of(self), true}}, run, {}});
    return self;
  }
  all.order.begin_work(slot);
  const char* way = !crosses ? "copies within" : to_device ? "copies in" : "copies out";
  all.counts[std::string(way) + (waits ? ", blocking" : "")]++;
  all.order.access(slot, bytes_of(source), false, "copy");
  all.order.access(slot, bytes_of(self), true, "copy");
  const Mark mark = all.streams.post(slot, [run]() mutable { run({}); });
  if (is_pinned) all.keep_pinned(on_the_host.const_data_ptr(), mark);
  if (waits) all.host_waits_for(mark, all.order.clock(slot), to_device ? "copy to the device" : "copy to the host");
  return self;
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto& all = device();
  Locked locked(all.lock);
  const int slot = current_slot();
  all.refuse_on_captured_stream(slot, "item");
  all.order.begin_work(slot);
  all.order.access(slot, bytes_of(self), false, "item");
  all.host_waits_for(all.streams.end_of(slot), all.order.clock(slot), "item");
  return on_host(self).item();
}

// As on a GPU, where the mask that backward needs is of booleans.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (train.has_value() && !*train) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul_(p == 1 ? 0.0 : 1.0 / (1.0 - p)), mask};
}

// The cell of an LSTM, which the processor composes and a GPU has as one kernel; the workspace holds its four gates.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(
    const Tensor& input_gates, const Tensor& hidden_gates, const Tensor& cell, const std::optional<Tensor>& input_bias,
    const std::optional<Tensor>& hidden_bias) {
  Tensor sum = input_gates + hidden_gates;
  for (const auto& bias : {input_bias, hidden_bias})
    if (bias && bias->defined()) sum = sum + *bias;
  auto parts = sum.chunk(4, 1);
  Tensor in = parts[0].sigmoid(), forget = parts[1].sigmoid(), made = parts[2].tanh(), out = parts[3].sigmoid();
  Tensor next = forget * cell + in * made;
  return {out * next.tanh(), next, at::cat({in, forget, made, out}, 1)};
}

std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(
    const std::optional<Tensor>& grad_hidden, const std::optional<Tensor>& grad_next, const Tensor& cell,
    const Tensor& next, const Tensor& workspace, bool has_bias) {
  auto gates = workspace.chunk(4, 1);
  const Tensor &in = gates[0], &forget = gates[1], &made = gates[2], &out = gates[3];
  Tensor hidden = grad_hidden && grad_hidden->defined() ? *grad_hidden : at::zeros_like(next);
  Tensor bent = next.tanh(), of_cell = hidden * out * (1 - bent * bent);
  if (grad_next && grad_next->defined()) of_cell = of_cell + *grad_next;
  Tensor of_gates = at::cat(
      {of_cell * made * in * (1 - in), of_cell * cell * forget * (1 - forget), of_cell * in * (1 - made * made),
       hidden * bent * out * (1 - out)},
      1);
  return {of_gates, of_cell * forget, has_bias ? of_gates.sum(0) : Tensor()};
}

Tensor view(const Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

void record_stream_(Tensor& self, c10::Stream stream) {
  record_stream(self.storage().data(), slot_of(stream.device_index(), stream.id()));
}

// Operations that torch composes by asking whether a tensor is of CUDA, which it would then give to cuDNN. It also
// composes structured ones of parts that the processor takes as a whole.
constexpr const char* kWhole[] = {
    "convolution", "convolution_overrideable", "convolution_backward", "convolution_backward_overrideable",
    "native_batch_norm", "native_batch_norm_backward"};

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("copy_", TORCH_FN(copy_));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("native_dropout", TORCH_FN(native_dropout));
  m.impl("_thnn_fused_lstm_cell", TORCH_FN(lstm_cell));
  m.impl("_thnn_fused_lstm_cell_backward_impl", TORCH_FN(lstm_cell_backward));
  m.impl("record_stream", TORCH_FN(record_stream_));
  m.impl("view", TORCH_FN(view));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("set_", TORCH_FN(at::native::set_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(static_cast<Tensor& (*)(Tensor&, at::Storage)>(at::native::set_)));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  std::set<std::string> whole(std::begin(kWhole), std::end(kWhole));
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.getNamespace() == std::string("aten") && op && op->hasSchema() &&
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional))
      whole.insert(c10::toString(name).substr(std::string("aten::").size()));
  }
  for (const auto& name : whole) m.impl(name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

}  // namespace fake
