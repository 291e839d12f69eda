// SPDX-License-Identifier: Apache-2.0
//
// Launches a vector add that `kernel.export(...)` wrote, without Python, Triton, CUDA's runtime or its headers.
//
//   g++ -std=c++17 -O2 -include out/add-....h examples/exported_kernel.cpp -ldl -o exported_kernel
//   ./exported_kernel out 1048576 [driver library]
//
// It prints the grid, whether the sum is right, and the time of a launch; exit status 0 when it is right.  `Driver` and `Loaded` work for
// every exported kernel: what is add's own begins at `main`.
#include <dlfcn.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

// The few functions and numbers of the driver that a launch needs, as cuda.h declares them.
struct LaunchAttribute { uint32_t id, pad; union { uint32_t numbers[16]; } value; };
struct LaunchConfig {
  uint32_t grid[3], block[3], shared_bytes;
  void *stream;
  LaunchAttribute *attributes;
  uint32_t attribute_count;
};
enum : uint32_t { COOPERATIVE = 2, CLUSTER_DIMENSION = 4, CLUSTER_SCHEDULING = 5, PROGRAMMATIC_SERIALIZATION = 6 };
enum : int { STATIC_SHARED = 1, MAX_DYNAMIC_SHARED = 8, NON_PORTABLE_CLUSTER = 14 };
constexpr uint32_t SHARED_WITHOUT_ASKING = 48 * 1024, PORTABLE_CLUSTER = 8;

[[noreturn]] static void fail(const std::string &what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

class Driver {
 public:
  explicit Driver(const char *library) : handle_(dlopen(library, RTLD_NOW)) {
    if (!handle_) fail(std::string("no driver: ") + dlerror());
    do_("cuInit", 0u);
    int device = 0;
    void *context = nullptr;
    do_("cuDeviceGet", &device, 0);
    do_("cuDevicePrimaryCtxRetain", &context, device);
    do_("cuCtxSetCurrent", context);
  }
  // Calls a function of the driver; whatever it refuses ends the program.
  template <typename... Values>
  void do_(const char *name, Values... values) const {
    auto function = reinterpret_cast<int (*)(Values...)>(dlsym(handle_, name));
    if (!function) fail(std::string(name) + ": not in this driver");
    if (int status = function(values...)) fail(std::string(name) + " failed: " + std::to_string(status));
  }

 private:
  void *handle_;
};

// A kernel on the device, ready to be launched.
class Loaded {
 public:
  Loaded(const Driver &driver, const bundler_kernel &kernel, const std::string &folder) : driver_(driver), kernel_(kernel) {
    std::ifstream file(folder + "/" + kernel.binary, std::ios::binary);
    std::vector<char> image((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    if (image.empty()) fail(std::string(kernel.binary) + ": not there, or empty");
    void *module = nullptr;
    driver.do_("cuModuleLoadData", &module, static_cast<const void *>(image.data()));
    driver.do_("cuModuleGetFunction", &function_, module, kernel.entry);
    int fixed_shared = 0;
    driver.do_("cuFuncGetAttribute", &fixed_shared, int(STATIC_SHARED), function_);
    if (kernel.shared_bytes + fixed_shared > SHARED_WITHOUT_ASKING)
      driver.do_("cuFuncSetAttribute", function_, int(MAX_DYNAMIC_SHARED), int(kernel.shared_bytes));
    if (kernel.cluster > PORTABLE_CLUSTER) driver.do_("cuFuncSetAttribute", function_, int(NON_PORTABLE_CLUSTER), 1);
  }
  // The scratch that a launch with this grid needs; 0 bytes: none.
  uint64_t blocks(const uint32_t grid[3]) const { return uint64_t(grid[0]) * grid[1] * grid[2] * kernel_.cluster; }

  void launch(const uint32_t grid[3], void *stream, std::vector<unsigned char> &buffer) const {
    if (!grid[0] || !grid[1] || !grid[2]) return;  // nothing to do, which the driver would refuse
    std::vector<void *> parameters;
    for (uint32_t i = 0; i < kernel_.parameter_count; i++) parameters.push_back(buffer.data() + kernel_.parameters[i].offset);
    std::vector<LaunchAttribute> attributes;
    auto add = [&](uint32_t id, uint32_t x, uint32_t y = 0, uint32_t z = 0) { attributes.push_back({id, 0, {{x, y, z}}}); };
    if (kernel_.pdl) add(PROGRAMMATIC_SERIALIZATION, 1);
    if (kernel_.cooperative) add(COOPERATIVE, 1);
    if (kernel_.cluster > 1) {
      add(CLUSTER_DIMENSION, kernel_.cluster, 1, 1);
      add(CLUSTER_SCHEDULING, 1);
    }
    LaunchConfig config = {{grid[0] * kernel_.cluster, grid[1], grid[2]}, {kernel_.block_threads, 1, 1}, kernel_.shared_bytes,
                           stream, attributes.data(), uint32_t(attributes.size())};
    driver_.do_("cuLaunchKernelEx", const_cast<const LaunchConfig *>(&config), function_, parameters.data(), static_cast<void **>(nullptr));
  }

 private:
  const Driver &driver_;
  const bundler_kernel &kernel_;
  void *function_ = nullptr;
};

int main(int count, char **words) {
  if (count < 3) fail("usage: exported_kernel FOLDER SIZE [DRIVER]");
  const int64_t n = std::atoll(words[2]);
  uint32_t grid[3];
  if (int why = add_grid(n, grid)) fail(why == BUNDLER_GRID_BAD_SIZE ? "not a size" : "more blocks than a device takes");
  std::printf("grid %u %u %u\n", grid[0], grid[1], grid[2]);

  Driver driver(count > 3 ? words[3] : "libcuda.so.1");
  Loaded add(driver, add_kernel, words[1]);
  std::vector<float> x(n), y(n), sum(n, -1.0f);
  for (int64_t i = 0; i < n; i++) x[i] = float(i % 1000), y[i] = float(2 * (i % 777));
  uint64_t device[3] = {0, 0, 0}, scratch[2] = {0, 0};
  const size_t bytes = n * sizeof(float);
  for (uint64_t &address : device) driver.do_("cuMemAlloc_v2", &address, bytes ? bytes : 1);
  driver.do_("cuMemcpyHtoD_v2", device[0], static_cast<const void *>(x.data()), bytes);
  driver.do_("cuMemcpyHtoD_v2", device[1], static_cast<const void *>(y.data()), bytes);
  const uint64_t needed[2] = {add_kernel.global_scratch_bytes * add.blocks(grid), add_kernel.profile_scratch_bytes * add.blocks(grid)};
  for (int i = 0; i < 2; i++)
    if (needed[i]) driver.do_("cuMemAlloc_v2", &scratch[i], size_t(needed[i]));  // aligned to 256 bytes, which is more than any kernel asks

  add_arguments arguments = {};
  arguments.x = device[0], arguments.y = device[1], arguments.out = device[2], arguments.n = decltype(arguments.n)(n);
  std::vector<unsigned char> buffer(add_kernel.buffer_bytes);
  add_pack(buffer.data(), &arguments, scratch[0], scratch[1]);
  const int launches = 100;
  add.launch(grid, nullptr, buffer);
  driver.do_("cuCtxSynchronize");
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < launches; i++) add.launch(grid, nullptr, buffer);
  const std::chrono::duration<double, std::micro> spent = std::chrono::steady_clock::now() - start;
  driver.do_("cuCtxSynchronize");
  driver.do_("cuMemcpyDtoH_v2", static_cast<void *>(sum.data()), device[2], bytes);

  int64_t wrong = 0;
  for (int64_t i = 0; i < n; i++) wrong += sum[i] != x[i] + y[i];
  std::printf("%lld of %lld wrong\n%.2f us a launch\n", (long long)wrong, (long long)n, spent.count() / launches);
  return wrong != 0;
}
