// Hooks, device guard and generators that make torch take the host's memory for a CUDA device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/empty.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/Generator.h>
#include <torch/csrc/utils/pybind.h>

namespace fake {
namespace {

thread_local int this_device = 0;
thread_local std::array<int64_t, kDevices> this_stream{};

// As philox on a GPU: a state of a seed and an offset, which each operation that draws moves on.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int index)
      : GeneratorImpl({c10::kCUDA, static_cast<c10::DeviceIndex>(index)}, c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}
  void set_current_seed(uint64_t seed) override {
    fake::device().refuse_while_capturing("set_current_seed");
    seed_ = seed, offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    fake::device().refuse_while_capturing("set_state");
    TORCH_CHECK(state.numel() == 2 * sizeof(uint64_t) && state.dtype() == caffe2::TypeMeta::Make<uint8_t>());
    const auto* words = static_cast<const uint64_t*>(state.data());
    seed_ = words[0], offset_ = words[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    fake::device().refuse_while_capturing("get_state");
    auto state = at::empty({2 * sizeof(uint64_t)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    auto* words = static_cast<uint64_t*>(state.data_ptr());
    words[0] = seed_, words[1] = offset_;
    return state.getIntrusivePtr();
  }
  uint64_t next() {  // splitmix64 of the pair
    uint64_t mixed = seed_ * 0x9E3779B97F4A7C15u + ++offset_ * 0xD1B54A32D192ED03u;
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EBu;
    return mixed ^ (mixed >> 31);
  }

 private:
  Generator* clone_impl() const override {
    auto* made = new Generator(device_.index());
    made->seed_ = seed_, made->offset_ = offset_;
    return made;
  }
  uint64_t seed_ = c10::default_rng_seed_val, offset_ = 0;
};

struct Event {
  std::shared_ptr<Recorded> last;
};

int slot(const c10::Stream& stream) { return slot_of(stream.device_index(), stream.id()); }

void synchronize_device(int index) {
  auto& all = device();
  Locked locked(all.lock);
  all.refuse_while_capturing("synchronize");
  all.counts["wait: device"]++;
  for (int stream = 0; stream < kStreams; stream++) {
    const int each = slot_of(index, stream);
    all.streams.run_until(all.streams.end_of(each));
    all.order.host_joins(all.order.clock(each));
  }
}

class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device wanted) const override {
    auto before = getDevice();
    setDevice(wanted);
    return before;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, static_cast<c10::DeviceIndex>(this_device)}; }
  void setDevice(c10::Device wanted) const override {
    if (wanted.has_index()) set_current_device(wanted.index());
  }
  void uncheckedSetDevice(c10::Device wanted) const noexcept override {
    if (wanted.has_index()) this_device = wanted.index();
  }
  c10::Stream getStream(c10::Device where) const override { return stream(where, this_stream[index(where)]); }
  c10::Stream getDefaultStream(c10::Device where) const override { return stream(where, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device where, bool) const override { return getNewStream(where); }
  c10::Stream getNewStream(c10::Device where, int = 0) const override {
    Locked locked(device().lock);  // from a pool whose streams are given out in turn, as torch's
    return stream(where, 1 + device().next_stream[index(where)]++ % (kStreams - 1));
  }
  c10::Stream exchangeStream(c10::Stream wanted) const override {
    auto before = getStream(wanted.device());
    this_stream[wanted.device_index()] = wanted.id();
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream wanted) const override {
    return reinterpret_cast<void*>(static_cast<intptr_t>(slot(wanted)));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device().num_devices); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto& all = device();
    Locked locked(all.lock);
    all.refuse_on_captured_stream(slot(stream), "an event, of which the fake device captures none");
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->last = all.streams.record(slot(stream), all.order.begin_work(slot(stream)));
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto& all = device();
    Locked locked(all.lock);
    all.refuse_on_captured_stream(slot(stream), "a wait for an event from outside");
    if (!event || !static_cast<Event*>(event)->last) return;
    const Recorded& recorded = *static_cast<Event*>(event)->last;
    all.order.stream_joins(slot(stream), recorded.clock);
    all.streams.wait(slot(stream), recorded);
  }
  bool queryEvent(void* event) const override {
    auto& all = device();
    Locked locked(all.lock);
    all.refuse_while_capturing("cudaEventQuery");
    if (!event || !static_cast<Event*>(event)->last) return true;
    const Recorded& recorded = *static_cast<Event*>(event)->last;
    const bool is_over = all.streams.query(recorded.mark);
    if (is_over) all.order.host_joins(recorded.clock);
    return is_over;
  }
  void synchronizeEvent(void* event) const override {
    auto& all = device();
    Locked locked(all.lock);
    if (!event || !static_cast<Event*>(event)->last) return;
    const Recorded& recorded = *static_cast<Event*>(event)->last;
    all.host_waits_for(recorded.mark, recorded.clock, "event");
  }
  bool queryStream(const c10::Stream& stream) const override {
    auto& all = device();
    Locked locked(all.lock);
    all.refuse_while_capturing("cudaStreamQuery");
    const bool is_over = all.streams.query(all.streams.end_of(slot(stream)));
    if (is_over) all.order.host_joins(all.order.clock(slot(stream)));
    return is_over;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    auto& all = device();
    Locked locked(all.lock);
    all.host_waits_for(all.streams.end_of(slot(stream)), all.order.clock(slot(stream)), "stream");
  }
  void synchronizeDevice(const c10::DeviceIndex index) const override { synchronize_device(index); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_stream(data.get(), slot(stream));
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return elapsed_ms(first, second);
  }
  static double elapsed_ms(void* first, void* second) {
    Locked locked(device().lock);
    auto last = [](void* event) { return event ? static_cast<Event*>(event)->last : nullptr; };
    auto begin = last(first), end = last(second);
    TORCH_CHECK(begin && end, "both events must be recorded before their time is asked");
    TORCH_CHECK(
        device().streams.is_reached(begin->mark) && device().streams.is_reached(end->mark), "device not ready");
    return static_cast<double>(end->time_ns - begin->time_ns) * 1e-6;
  }

 private:
  static c10::DeviceIndex index(c10::Device where) {
    return where.has_index() ? where.index() : static_cast<c10::DeviceIndex>(this_device);
  }
  static c10::Stream stream(c10::Device where, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index(where)}, id);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

}  // namespace

Device& device() {
  static auto* made = new Device;  // outlives every tensor
  return *made;
}

int current_device() { return this_device; }
void set_current_device(int wanted) {
  TORCH_CHECK(wanted >= 0 && wanted < device().num_devices, "CUDA error: invalid device ordinal");
  this_device = wanted;
}
int64_t current_stream(int index) { return this_stream[index]; }
void set_current_stream(int index, int64_t stream) { this_stream[index] = stream; }

const at::Generator& default_generator(int index) {
  static const auto* made = [] {
    auto* all = new std::vector<at::Generator>;
    for (int each = 0; each < kDevices; each++) all->push_back(at::make_generator<Generator>(each));
    return all;
  }();
  return made->at(index < 0 ? this_device : index);
}

uint64_t next_seed(const std::optional<at::Generator>& given) {
  const bool is_ours = given && given->defined() && given->device().is_cuda();
  TORCH_CHECK(is_ours || !given || !given->defined(), "Expected a 'cuda' device type for generator but found 'cpu'");
  at::Generator chosen = is_ours ? *given : default_generator(-1);
  std::lock_guard<std::mutex> locked(chosen.mutex());
  return static_cast<Generator*>(chosen.unsafeGetGeneratorImpl())->next();
}

}  // namespace fake

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(fake::device().num_devices); }
  int getNumGPUs() const override { return fake::device().num_devices; }
  DeviceIndex current_device() const override { return static_cast<DeviceIndex>(fake::current_device()); }
  DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(DeviceIndex index) const override { fake::set_current_device(index); }
  void deviceSynchronize(DeviceIndex index) const override { fake::synchronize_device(index); }
  const Generator& getDefaultGenerator(DeviceIndex index) const override { return fake::default_generator(index); }
  Generator getNewGenerator(DeviceIndex index) const override {
    return make_generator<fake::Generator>(index < 0 ? fake::current_device() : index);
  }
  bool isPinnedPtr(const void* place) const override {
    fake::Locked locked(fake::device().lock);
    return fake::device().order.is_pinned(place);
  }
  Allocator* getPinnedMemoryAllocator() const override { return fake::pinned_allocator(); }
  Allocator* getCUDADeviceAllocator() const override { return fake::device_allocator(); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);  // by this name torch looks for them

}  // namespace at

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using fake::device;
  using fake::Locked;
  using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;
  c10::SetAllocator(c10::kCUDA, fake::device_allocator(), 1);
  m.def("open", [](int num_devices, int64_t total_bytes) {
    TORCH_CHECK(num_devices >= 1 && num_devices <= fake::kDevices, "1 to ", fake::kDevices, " fake devices");
    device().num_devices = num_devices, device().total_bytes = total_bytes;
  });
  m.def("set_late", [](bool late, uint64_t seed) { Locked l(device().lock); device().streams.set_late(late, seed); }, NoGil());
  m.def("current_device", &fake::current_device);
  m.def("set_device", &fake::set_current_device);
  m.def("current_stream", &fake::current_stream);
  m.def("set_stream", &fake::set_current_stream);
  m.def("synchronize", &fake::synchronize_device, NoGil());
  m.def("new_pool", [] { Locked l(device().lock); return device().graphs.new_pool(); });
  m.def("begin_capture", [](int64_t pool) {
    Locked l(device().lock);
    TORCH_CHECK(fake::current_stream(fake::current_device()), "CUDA error: operation not permitted on the default stream");
    return device().graphs.begin(fake::current_slot(), pool);
  });
  m.def("end_capture", [] { Locked l(device().lock); device().graphs.end(); });
  m.def("drop_graph", [](int64_t graph) { Locked l(device().lock); device().graphs.drop(graph); });
  m.def("is_capturing", [] { Locked l(device().lock); return device().graphs.is_capturing(fake::current_slot()); });
  m.def("replay", [](int64_t graph) { Locked l(device().lock); device().replay(graph); }, NoGil());
  m.def("empty_cache", [] { Locked l(device().lock); device().empty_cache(); }, NoGil());
  m.def("statistics", [](int index) {
    Locked l(device().lock);
    const auto& of = device().statistics.at(index);
    return std::array<int64_t, 4>{of.allocated, of.max_allocated, of.reserved, of.max_reserved};
  }, NoGil());
  m.def("reset_peaks", [](int index) {
    Locked l(device().lock);
    auto& of = device().statistics.at(index);
    of.max_allocated = of.allocated, of.max_reserved = of.reserved;
  }, NoGil());
  m.def("limit", [](int index, int64_t bytes) { Locked l(device().lock); device().limits.at(index) = bytes; }, NoGil());
  m.def("default_generator", [](int index) {
    return pybind11::reinterpret_steal<pybind11::object>(THPGenerator_initDefaultGenerator(fake::default_generator(index)));
  });
  m.def("elapsed_ms", [](intptr_t first, intptr_t second) {
    return fake::Guard::elapsed_ms(reinterpret_cast<void*>(first), reinterpret_cast<void*>(second));
  });
  m.def("pin", [](intptr_t begin, size_t size) { return fake::pin(reinterpret_cast<void*>(begin), size); }, NoGil());
  m.def("unpin", [](intptr_t begin) { return fake::unpin(reinterpret_cast<void*>(begin)); }, NoGil());
  auto bytes = [](intptr_t begin, size_t size) {
    return fake::Bytes{reinterpret_cast<const char*>(begin), reinterpret_cast<const char*>(begin) + size};
  };
  m.def("host_access", [bytes](intptr_t begin, size_t size, bool writes, const std::string& name) {
    Locked l(device().lock);
    device().order.host_access(bytes(begin, size), writes, name);
  }, NoGil());
  m.def("begin_message", [bytes](intptr_t begin, size_t size, bool writes, const std::string& name) {
    Locked l(device().lock);
    return device().order.begin_message(bytes(begin, size), writes, name);
  }, NoGil());
  m.def("end_message", [](int64_t id) { Locked l(device().lock); device().order.end_message(id); }, NoGil());
  m.def("forget_message", [](int64_t id) { Locked l(device().lock); device().order.forget_message(id); }, NoGil());
  m.def("races", [] { Locked l(device().lock); return device().order.races; }, NoGil());
  m.def("counts", [] { Locked l(device().lock); return device().counts; }, NoGil());
  m.def("clear_races", [] { Locked l(device().lock); device().order.races.clear(); }, NoGil());
  m.def("clear_counts", [] { Locked l(device().lock); device().counts.clear(); }, NoGil());
}
