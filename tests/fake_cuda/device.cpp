// A "cuda" device of two GPUs whose memory and kernels are those of the CPU; see __init__.py.

// single operations instead of all: half of the time of the compiler
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/GPUTrace.h>
#include <torch/csrc/PyInterpreter.h>
#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <set>
#include <thread>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::SymIntArrayRef;

constexpr DeviceIndex NUM_DEVICES = 2;
constexpr size_t TOTAL = size_t(1) << 30;  // bytes of memory of each
constexpr auto CUDA = c10::DeviceType::CUDA;

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream[NUM_DEVICES] = {0, 0};
thread_local bool in_fallback = false;  // its copies are no copies of the program
std::atomic<int64_t> next_stream{1}, next_event{1};

// ---------------------------------------------------------------------- time: a stream that sleeps is busy until then

using Clock = std::chrono::steady_clock;
using StreamKey = std::pair<DeviceIndex, c10::StreamId>;
using Seen = std::map<StreamKey, int64_t>;  // stream -> its newest copy to pinned memory that is done by then
struct Event { int64_t id; Clock::time_point ready; DeviceIndex device; Seen seen; };

std::mutex busy_mutex;
std::map<std::pair<DeviceIndex, c10::StreamId>, Clock::time_point> busy_until;

Clock::time_point ready_at(const c10::Stream& stream) {
  std::lock_guard<std::mutex> lock(busy_mutex);
  return std::max(Clock::now(), busy_until[{stream.device_index(), stream.id()}]);
}
void be_busy_until(const c10::Stream& stream, Clock::time_point then) {
  std::lock_guard<std::mutex> lock(busy_mutex);
  auto& until = busy_until[{stream.device_index(), stream.id()}];
  until = std::max(until, then);
}

// ---------------------------------------------------------------------- what Python is told

PyObject* on_wait = nullptr;  // called with the name of what makes the host wait
PyObject* on_call = nullptr;

void wait_for_device(const char* what, Clock::time_point until) {
  if (in_fallback) return;
  std::this_thread::sleep_until(until);
  if (on_wait == nullptr) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::function>(on_wait)(what);
}

void call_host(const char* what) {  // a call that CUDA may forbid during a capture
  if (on_call == nullptr || !Py_IsInitialized()) return;
  pybind11::gil_scoped_acquire gil;
  pybind11::reinterpret_borrow<pybind11::function>(on_call)(what);
}

template <class Call>
void trace(Call call) {  // for torch's sanitizer, as the real device does it
  if (const auto* interpreter = c10::impl::GPUTrace::get_trace()) call(**interpreter);
}

// ---------------------------------------------------------------------- copies that arrive when the host has waited for them

constexpr int GARBAGE = 0xCD;  // fresh memory is never zero by chance
struct Copy { Tensor to, values; const char* from; };  // `to` is a view without ownership

std::recursive_mutex copies_mutex;
std::map<StreamKey, std::map<int64_t, Copy>> under_way;
std::map<StreamKey, Seen> seen_by;
int64_t num_copies = 0;

StreamKey key_of(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }

void merge(Seen& into, const Seen& more) {
  for (auto& [stream, number] : more) into[stream] = std::max(into[stream], number);
}
Seen seen_on(const c10::Stream& stream) {
  std::lock_guard lock(copies_mutex);
  return seen_by[key_of(stream)];
}
void arrive(const Seen& seen) {
  std::lock_guard lock(copies_mutex);
  for (auto& [stream, number] : seen) {
    auto& copies = under_way[stream];
    for (auto next = copies.begin(); next != copies.end() && next->first <= number; next = copies.erase(next)) {
      next->second.to.copy_(next->second.values);
    }
  }
}
void end_copies_into(const char* start, size_t size, bool arrives) {
  std::lock_guard lock(copies_mutex);
  for (auto& [stream, copies] : under_way) {
    for (auto next = copies.begin(); next != copies.end();) {
      auto* address = static_cast<const char*>(next->second.to.data_ptr());
      if (address < start || address >= start + size) { ++next; continue; }
      if (arrives) next->second.to.copy_(next->second.values);
      next = copies.erase(next);
    }
  }
}
// a stream that frees memory may use it again at once, while another stream still copies from it
void spoil_copies_from(const char* start, size_t size, const StreamKey& own) {
  std::lock_guard lock(copies_mutex);
  for (auto& [stream, copies] : under_way) {
    for (auto& [number, copy] : copies) {
      if (stream != own && copy.from >= start && copy.from < start + size) memset(copy.values.data_ptr(), GARBAGE, copy.values.nbytes());
    }
  }
}
void start_copy(const c10::Stream& stream, const Tensor& to, const Tensor& from) {  // both on the CPU
  std::lock_guard lock(copies_mutex);
  end_copies_into(static_cast<const char*>(to.data_ptr()), to.nbytes(), false);  // it writes over them
  Tensor view = at::from_blob(to.data_ptr(), to.sizes(), to.strides(), to.options());
  under_way[key_of(stream)][++num_copies] = {view, from.clone(), static_cast<const char*>(from.data_ptr())};
  seen_by[key_of(stream)][key_of(stream)] = num_copies;
  if (to.is_contiguous()) memset(to.data_ptr(), GARBAGE, to.nbytes());
}

// ---------------------------------------------------------------------- streams and events

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = CUDA;
  static DeviceIndex index(Device device) { return device.index() < 0 ? current_device : device.index(); }
  static uintptr_t id_of(void* event) { return static_cast<Event*>(event)->id; }
  static c10::Stream stream_of(Device device, c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, Device(CUDA, index(device)), id);
  }

  c10::DeviceType type() const override { return CUDA; }
  DeviceIndex deviceCount() const noexcept override { return NUM_DEVICES; }
  Device getDevice() const override { return {CUDA, current_device}; }
  void setDevice(Device device) const override { current_device = index(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Device exchangeDevice(Device device) const override {
    Device former = getDevice();
    setDevice(device);
    return former;
  }

  c10::Stream getStream(Device device) const override { return stream_of(device, current_stream[index(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    auto id = next_stream++;
    trace([&](auto& interpreter) { interpreter.trace_gpu_stream_creation(CUDA, id); });
    return stream_of(device, id);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto former = getStream(stream.device());
    current_stream[index(stream.device())] = stream.id();
    return former;
  }
  bool queryStream(const c10::Stream& stream) const override {
    const bool is_done = ready_at(stream) <= Clock::now();
    if (is_done) arrive(seen_on(stream));
    return is_done;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_device("stream", ready_at(stream));
    arrive(seen_on(stream));
    trace([&](auto& interpreter) { interpreter.trace_gpu_stream_synchronization(CUDA, stream.id()); });
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    auto until = Clock::now();
    {
      std::lock_guard<std::mutex> lock(busy_mutex);
      for (auto& [stream, then] : busy_until) {
        if (stream.first == device) until = std::max(until, then);
      }
    }
    wait_for_device("device", until);
    Seen all;
    {
      std::lock_guard lock(copies_mutex);
      for (auto& [stream, copies] : under_way) {
        if (stream.first == device) all[stream] = num_copies;
      }
    }
    arrive(all);
    trace([&](auto& interpreter) { interpreter.trace_gpu_device_synchronization(CUDA); });
  }

  void record(void** event, const c10::Stream& stream, const DeviceIndex device, const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "Event device ", int(device),
                " does not match recording stream's device ", int(stream.device_index()), ".");
    if (*event == nullptr) {
      *event = new Event{next_event++, {}, stream.device_index(), {}};
      trace([&](auto& interpreter) { interpreter.trace_gpu_event_creation(CUDA, id_of(*event)); });
    }
    static_cast<Event*>(*event)->ready = ready_at(stream);
    static_cast<Event*>(*event)->seen = seen_on(stream);
    trace([&](auto& interpreter) { interpreter.trace_gpu_event_record(CUDA, id_of(*event), stream.id()); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;  // it was never recorded
    be_busy_until(stream, static_cast<Event*>(event)->ready);
    {
      std::lock_guard lock(copies_mutex);
      merge(seen_by[key_of(stream)], static_cast<Event*>(event)->seen);
    }
    trace([&](auto& interpreter) { interpreter.trace_gpu_event_wait(CUDA, id_of(event), stream.id()); });
  }
  bool queryEvent(void* event) const override {
    const bool is_done = event == nullptr || static_cast<Event*>(event)->ready <= Clock::now();
    if (is_done && event != nullptr) arrive(static_cast<Event*>(event)->seen);
    return is_done;
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    TORCH_CHECK(static_cast<Event*>(event)->device == current_device, "this thread waits for cuda:",
                int(static_cast<Event*>(event)->device), " and would make a context on its device, cuda:", int(current_device));
    wait_for_device("event", static_cast<Event*>(event)->ready);
    arrive(static_cast<Event*>(event)->seen);
    trace([&](auto& interpreter) { interpreter.trace_gpu_event_synchronization(CUDA, id_of(event)); });
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Event*>(to)->ready - static_cast<Event*>(from)->ready).count();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (event == nullptr || !Py_IsInitialized()) return;
    trace([&](auto& interpreter) { interpreter.trace_gpu_event_deletion(CUDA, id_of(event)); });
    delete static_cast<Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// ---------------------------------------------------------------------- memory

struct DeviceMemory final : c10::DeviceAllocator {
  static std::mutex& mutex() { static std::mutex it; return it; }
  struct Block { StreamKey stream; size_t size; };
  static std::map<void*, Block>& blocks() { static std::map<void*, Block> it; return it; }
  static inline size_t limit = TOTAL;
  static inline int64_t used[NUM_DEVICES], peak[NUM_DEVICES], reserved[NUM_DEVICES];

  static void give_back(void* memory) {
    Block block;
    {
      std::lock_guard<std::mutex> lock(mutex());
      block = blocks()[memory];
      used[block.stream.first] -= block.size;
      blocks().erase(memory);
    }
    spoil_copies_from(static_cast<const char*>(memory), block.size, block.stream);
    if (Py_IsInitialized()) trace([&](auto& interpreter) { interpreter.trace_gpu_memory_deallocation(CUDA, uintptr_t(memory)); });
    free(memory);
  }
  c10::DataPtr allocate(size_t size) override {
    if (size == 0) return {nullptr, Device(CUDA, current_device)};
    TORCH_CHECK_WITH(OutOfMemoryError, used[current_device] + size <= limit, "CUDA out of memory");
    void* memory = malloc(size);
    memset(memory, GARBAGE, size);
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks()[memory] = {{current_device, current_stream[current_device]}, size};
      used[current_device] += size;
      peak[current_device] = std::max(peak[current_device], used[current_device]);
      reserved[current_device] = std::max(reserved[current_device], used[current_device]);
    }
    trace([&](auto& interpreter) { interpreter.trace_gpu_memory_allocation(CUDA, uintptr_t(memory)); });
    return {memory, memory, &give_back, Device(CUDA, current_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { std::copy(used, used + NUM_DEVICES, reserved); }
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex());
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0].current = used[device];
    stats.allocated_bytes[0].peak = peak[device];
    stats.reserved_bytes[0].current = stats.reserved_bytes[0].peak = reserved[device];
    return stats;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override { return {TOTAL - reserved[device], TOTAL}; }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex device) override { peak[device] = used[device]; }
};
DeviceMemory device_memory;

struct PinnedMemory final : at::HostAllocator {
  static std::mutex& mutex() { static std::mutex it; return it; }
  static std::map<const char*, size_t>& blocks() { static std::map<const char*, size_t> it; return it; }
  static inline int64_t num_allocated = 0;

  static void give_back(void* memory) {
    auto* start = static_cast<const char*>(memory);
    size_t size;
    {
      std::lock_guard<std::mutex> lock(mutex());
      size = blocks()[start];
      blocks().erase(start);
    }
    end_copies_into(start, size, false);  // torch keeps the memory until the copies are done
    free(memory);
  }
  static bool holds(const void* address) {
    std::lock_guard<std::mutex> lock(mutex());
    auto next = blocks().upper_bound(static_cast<const char*>(address));
    if (next == blocks().begin()) return false;
    auto [start, size] = *--next;
    return address < start + size;
  }
  c10::DataPtr allocate(size_t size) override {
    size = std::max<size_t>(size, 1);
    void* memory = malloc(size);
    {
      std::lock_guard<std::mutex> lock(mutex());
      blocks()[static_cast<const char*>(memory)] = size;
      num_allocated++;
    }
    call_host("cudaHostAlloc");
    return {memory, memory, &give_back, Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }
  void copy_data(void* to, const void* from, std::size_t size) const override { memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
PinnedMemory pinned_memory;
REGISTER_HOST_ALLOCATOR(CUDA, &pinned_memory)

// ---------------------------------------------------------------------- operations

Tensor on_cpu(const Tensor& tensor) {  // the same memory
  return tensor.is_cpu() ? tensor
                         : at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_memory,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.numel() == 0) return to;
  if (to.is_cpu() != from.is_cpu() && !in_fallback) {
    const auto stream = Guard().getStream(to.is_cpu() ? from.device() : to.device());
    const auto& host = to.is_cpu() ? to : from;
    const bool is_pinned = PinnedMemory::holds(host.data_ptr());
    if (from.is_cpu() && is_pinned) end_copies_into(static_cast<const char*>(host.storage().data()), host.storage().nbytes(), true);
    if (non_blocking && is_pinned && to.is_cpu()) {
      start_copy(stream, to, on_cpu(from).to(to.scalar_type()));  // without a copy if the types are equal
      return to;
    }
    if (!non_blocking || !is_pinned) {
      const char* copy = to.is_cpu() ? "copy to the host" : "copy to the device";
      wait_for_device(non_blocking ? "copy of pageable memory" : copy, ready_at(stream));
      if (to.is_cpu() || !non_blocking) arrive(seen_on(stream));
    }
  }
  on_cpu(to).copy_(on_cpu(from));
  return to;
}
Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  Tensor target = to;
  return copy_(target, from, non_blocking);
}
at::Scalar item(const Tensor& tensor) {
  const auto stream = Guard().getStream(tensor.device());
  wait_for_device("item", ready_at(stream));
  if (!in_fallback) arrive(seen_on(stream));
  return on_cpu(tensor).item();
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  size_t needed = (c10::multiply_integers(sizes) + tensor.storage_offset()) * tensor.element_size();
  auto storage = tensor.storage();
  if (needed > storage.nbytes()) {
    auto memory = device_memory.allocate(needed);
    if (storage.nbytes()) memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  if (to.sizes() != from.sizes()) resize_(to, from.sym_sizes(), std::nullopt);
  return copy_from(from, to, false);
}
Tensor& set_view(Tensor& tensor, at::Storage storage, c10::SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  if (stride.empty()) impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.expect_int());
  return tensor;
}
Tensor& set_storage(Tensor& tensor, at::Storage storage) {
  c10::SymInt size = static_cast<int64_t>(storage.nbytes() / tensor.element_size());
  return set_view(tensor, std::move(storage), 0, {size}, {});
}
Tensor& set_tensor(Tensor& tensor, const Tensor& other) {
  return set_view(tensor, other.storage(), other.sym_storage_offset(), other.sym_sizes(), other.sym_strides());
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) { return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return at::native::_reshape_alias(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                                           offset ? std::optional(offset->expect_int()) : std::nullopt);
}
void record_stream(Tensor&, at::Stream) {}

const std::set<std::string> READING = {"aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero", "aten::_unique2"};

// whether a mask is among the indices of x[mask] or x[mask] = y
bool has_mask(const torch::jit::Stack& stack, size_t num_arguments) {
  if (num_arguments < 2 || !torch::jit::peek(stack, 1, num_arguments).isList()) return false;
  for (const c10::IValue& index : torch::jit::peek(stack, 1, num_arguments).toListRef()) {
    if (index.isTensor() && index.toTensor().defined() && index.toTensor().scalar_type() == at::kBool) return true;
  }
  return false;
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& name = op.schema().name();
  const bool by_mask = name.find("index") != std::string::npos && has_mask(*stack, op.schema().arguments().size());
  if (by_mask || READING.count(name)) wait_for_device(name.c_str(), ready_at(Guard().getStream(Guard().getDevice())));
  const bool former = in_fallback;
  in_fallback = true;
  try {
    at::native::cpu_fallback(op, stack);
  } catch (...) {
    in_fallback = former;
    throw;
  }
  in_fallback = former;
}

// its schema does not say that it writes the running statistics, so the fallback would lose them
void batch_norm(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  for (size_t place : {stack->size() - 5, stack->size() - 4}) {  // running_mean, running_var
    auto& argument = (*stack)[place];
    if (argument.isTensor() && argument.toTensor().defined()) argument = on_cpu(argument.toTensor());
  }
  fall_back(op, stack);
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_view);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("as_strided", as_strided);
  m.impl("unfold", &at::native::unfold);
  m.impl("record_stream", record_stream);
  m.impl("native_batch_norm", torch::CppFunction::makeFromBoxedFunction<&batch_norm>());
}

}  // namespace

// ---------------------------------------------------------------------- what torch asks

namespace fake {
struct CUDAHooks final : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return NUM_DEVICES; }
  int getNumGPUs() const override { return NUM_DEVICES; }
  DeviceIndex current_device() const override { return ::current_device; }
  DeviceIndex getCurrentDevice() const override { return ::current_device; }
  void setCurrentDevice(DeviceIndex device) const override { ::current_device = device; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override { return PinnedMemory::holds(address); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace fake

namespace {
struct Start {
  Start() { c10::SetAllocator(CUDA, &device_memory, 5); }
} start;
}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("trace", [] { c10::impl::GPUTrace::set_trace(getPyInterpreter()); });
  m.def("call_on_wait", [](pybind11::function call) { on_wait = call.release().ptr(); });
  m.def("call_on_host_call", [](pybind11::function call) { on_call = call.release().ptr(); });
  m.def("sleep", [](double seconds) {
    auto stream = Guard().getStream(Guard().getDevice());
    be_busy_until(stream, ready_at(stream) + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
  });
  m.def("set_limit", [](double fraction) { DeviceMemory::limit = fraction * TOTAL; });
  m.def("num_pinned", [] { return PinnedMemory::num_allocated; });
}
