/* SPDX-License-Identifier: Apache-2.0
 *
 * Stands in for libamdhip64 and writes down every call.  It includes AMD's own header, so the compiler refuses a function that the
 * header declares otherwise.  Statuses are those that the header documents; what it leaves open is as in the sources of HIP's runtime.
 * With LACKING defined, the functions are missing that a library may lack.
 */
#define _GNU_SOURCE
#include <hip/hip_runtime_api.h>
#include <elf.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 8
#define EM_AMDGPU_NUMBER 224
#define FIRST_STREAM 0x5000

struct device {
  char arch[64];
  unsigned machine, xnack, sramecc; /* as in e_flags of a code object */
  int threads, shared, units, warp, cooperative;
};
struct memory {
  uint64_t start, end;
  int type, device, managed;
};
struct module {
  const unsigned char *image;
  int device, number;
};
struct function {
  struct module *module;
  char name[256];
};
struct rule {
  char call[64];
  int status;
};

static struct device devices[MOST];
static struct memory memories[MOST];
static struct rule rules[MOST];
static struct function functions[64];
static struct module modules[64];
static int device_count, memory_count, rule_count, function_count, module_count, max_threads, max_blocks;
static unsigned parameter_sizes[64], parameter_count;
static uint64_t allocated, next_address = 0x7f5c00000000;
static char text[1 << 16];
static _Thread_local int current, last_error;

/* ------------------------------------------------------------------------------------------------ what tests arrange */

void stand_in_reset(void) {
  device_count = memory_count = rule_count = function_count = module_count = 0;
  max_threads = 1024, max_blocks = 1 << 30;
  parameter_count = 0, allocated = 0, next_address = 0x7f5c00000000, current = 0, last_error = 0, text[0] = 0;
}
void stand_in_device(const char *arch, unsigned machine, unsigned xnack, unsigned sramecc, int threads, int shared, int units,
                     int warp, int cooperative) {
  struct device made = {"", machine, xnack, sramecc, threads, shared, units, warp, cooperative};
  snprintf(made.arch, sizeof made.arch, "%s", arch);
  devices[device_count++] = made;
}
void stand_in_memory(uint64_t start, uint64_t end, int type, int device, int managed) {
  struct memory made = {start, end, type, device, managed};
  memories[memory_count++] = made;
}
/* The next call of this name fails. */
void stand_in_fail(const char *call, int status) {
  struct rule *rule = &rules[rule_count++];
  snprintf(rule->call, sizeof rule->call, "%s", call);
  rule->status = status;
}
void stand_in_limits(int threads, int blocks) { max_threads = threads, max_blocks = blocks; }
void stand_in_parameters(const unsigned *sizes, unsigned count) {
  memcpy(parameter_sizes, sizes, count * sizeof *sizes);
  parameter_count = count;
}
const char *stand_in_text(void) { return text; }
int stand_in_last_error(void) { return last_error; }
uint64_t stand_in_allocated(void) { return allocated; }

/* ------------------------------------------------------------------------------------------------------ the record */

static void say(const char *format, ...) {
  size_t length = strlen(text);
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text + length, sizeof text - length, format, arguments);
  va_end(arguments);
}

/* Ends the line of a call; a status other than zero stays the thread's last error until it is asked for. */
static hipError_t answer(const char *call, int status) {
  int index;
  for (index = 0; index < rule_count; index++)
    if (strcmp(rules[index].call, call) == 0) {
      status = rules[index].status;
      rules[index].call[0] = 0;
    }
  say(") -> %d\n", status);
  if (status)
    last_error = status;
  return (hipError_t)status;
}
static int will_fail(const char *call) {
  int index;
  for (index = 0; index < rule_count; index++)
    if (strcmp(rules[index].call, call) == 0)
      return 1;
  return 0;
}
#define BEGIN(...) say("%s(", __func__), say(__VA_ARGS__)
/* Stops at a failure that a test arranged, before the call has an effect. */
#define ANSWER_IF_ARRANGED()                                                                                           \
  if (will_fail(__func__))                                                                                             \
  return answer(__func__, 0)
#define ANSWER(status) return answer(__func__, status)

/* ------------------------------------------------------------------------------------------------------- the calls */

hipError_t hipInit(unsigned int flags) {
  BEGIN("flags=%u", flags);
  ANSWER(device_count ? hipSuccess : hipErrorNoDevice);
}
hipError_t hipGetLastError(void) {
  int found = last_error;
  say("hipGetLastError() -> %d\n", found);
  last_error = 0;
  return (hipError_t)found;
}
#ifndef LACKING
const char *hipGetErrorString(hipError_t status) {
  switch (status) {
  case hipErrorInvalidValue: return "invalid argument";
  case hipErrorOutOfMemory: return "out of memory";
  case hipErrorNoDevice: return "no ROCm-capable device is detected";
  case hipErrorInvalidDevice: return "invalid device ordinal";
  case hipErrorInvalidImage: return "device kernel image is invalid";
  case hipErrorNoBinaryForGpu: return "no kernel image is available for execution on the device";
  case hipErrorNotFound: return "named symbol not found";
  case hipErrorLaunchFailure: return "unspecified launch failure";
  case hipErrorCooperativeLaunchTooLarge: return "too many blocks in cooperative launch";
  default: return "another error";
  }
}
#endif
hipError_t hipGetDeviceCount(int *count) {
  BEGIN("");
  *count = device_count;
  ANSWER(device_count ? hipSuccess : hipErrorNoDevice);
}
hipError_t hipGetDevice(int *device) {
  BEGIN("device=%d", current);
  ANSWER_IF_ARRANGED();
  *device = current;
  ANSWER(hipSuccess);
}
hipError_t hipSetDevice(int device) {
  BEGIN("device=%d", device);
  ANSWER_IF_ARRANGED();
  if (device < 0 || device >= device_count)
    ANSWER(hipErrorInvalidDevice);
  current = device;
  ANSWER(hipSuccess);
}
hipError_t hipDeviceGetAttribute(int *value, hipDeviceAttribute_t attribute, int device) {
  const struct device *asked = &devices[device];
  BEGIN("attribute=%s, device=%d",
        attribute == hipDeviceAttributeCooperativeLaunch           ? "CooperativeLaunch"
        : attribute == hipDeviceAttributeMaxThreadsPerBlock        ? "MaxThreadsPerBlock"
        : attribute == hipDeviceAttributeMultiprocessorCount       ? "MultiprocessorCount"
        : attribute == hipDeviceAttributeMaxSharedMemoryPerBlock   ? "MaxSharedMemoryPerBlock"
        : attribute == hipDeviceAttributeWarpSize                  ? "WarpSize"
                                                                   : "?",
        device);
  if (device < 0 || device >= device_count)
    ANSWER(hipErrorInvalidDevice);
  switch (attribute) {
  case hipDeviceAttributeCooperativeLaunch: *value = asked->cooperative; break;
  case hipDeviceAttributeMaxThreadsPerBlock: *value = asked->threads; break;
  case hipDeviceAttributeMultiprocessorCount: *value = asked->units; break;
  case hipDeviceAttributeMaxSharedMemoryPerBlock: *value = asked->shared; break;
  case hipDeviceAttributeWarpSize: *value = asked->warp; break;
  default: ANSWER(hipErrorInvalidValue);
  }
  ANSWER(hipSuccess);
}
hipError_t hipGetDevicePropertiesR0600(hipDeviceProp_tR0600 *properties, int device) {
  BEGIN("device=%d", device);
  if (device < 0 || device >= device_count)
    ANSWER(hipErrorInvalidDevice);
  memset(properties, 0xff, sizeof *properties);
  strcpy(properties->gcnArchName, devices[device].arch);
  ANSWER(hipSuccess);
}

/* A feature of a code object: 0 and 1 run in either mode, 2 needs it off, 3 on. */
static int runs(unsigned wanted, unsigned mode) { return wanted < 2 || wanted == mode; }

hipError_t hipModuleLoadData(hipModule_t *module, const void *image) {
  const Elf64_Ehdr *header = image;
  const struct device *device = &devices[current];
  struct module *made = &modules[module_count];
  int is_elf = memcmp(image, ELFMAG, SELFMAG) == 0;
  BEGIN("image=%s", is_elf ? "ELF" : "no ELF");
  if (is_elf)
    say(" machine 0x%x xnack %u sramecc %u", header->e_flags & 0xff, header->e_flags >> 8 & 3, header->e_flags >> 10 & 3);
  ANSWER_IF_ARRANGED();
  if (!is_elf || header->e_machine != EM_AMDGPU_NUMBER)
    ANSWER(hipErrorInvalidImage);
  if ((header->e_flags & 0xff) != device->machine || !runs(header->e_flags >> 8 & 3, device->xnack) ||
      !runs(header->e_flags >> 10 & 3, device->sramecc))
    ANSWER(hipErrorNoBinaryForGpu);
  made->image = image, made->device = current, made->number = ++module_count;
  *module = (hipModule_t)made;
  say(", module=m%d", made->number);
  ANSWER(hipSuccess);
}
hipError_t hipModuleUnload(hipModule_t module) {
  struct module *found = (struct module *)module;
  BEGIN("module=m%d", found->number);
  ANSWER_IF_ARRANGED();
  if (found->image == NULL)
    ANSWER(hipErrorNotFound);
  found->image = NULL;
  ANSWER(hipSuccess);
}

/* Whether the table of dynamic symbols has a kernel descriptor of this name. */
static int has_kernel(const unsigned char *image, const char *name) {
  const Elf64_Ehdr *header = (const Elf64_Ehdr *)image;
  const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
  char descriptor[260];
  int index;
  snprintf(descriptor, sizeof descriptor, "%s.kd", name);
  for (index = 0; index < header->e_shnum; index++) {
    const Elf64_Sym *symbols = (const Elf64_Sym *)(image + sections[index].sh_offset);
    const char *names = (const char *)image + sections[sections[index].sh_link].sh_offset;
    size_t row;
    for (row = 0; sections[index].sh_type == SHT_DYNSYM && row < sections[index].sh_size / sizeof *symbols; row++)
      if (strcmp(names + symbols[row].st_name, descriptor) == 0)
        return 1;
  }
  return 0;
}
hipError_t hipModuleGetFunction(hipFunction_t *function, hipModule_t module, const char *name) {
  struct module *in = (struct module *)module;
  struct function *made = &functions[function_count];
  BEGIN("module=m%d, name=%s", in->number, name);
  if (!has_kernel(in->image, name))
    ANSWER(hipErrorNotFound);
  made->module = in;
  snprintf(made->name, sizeof made->name, "%s", name);
  *function = (hipFunction_t)made;
  say(", function=f%d", ++function_count);
  ANSWER(hipSuccess);
}
static int number_of(hipFunction_t function) { return (int)((struct function *)function - functions) + 1; }
hipError_t hipFuncGetAttribute(int *value, hipFunction_attribute attribute, hipFunction_t function) {
  BEGIN("attribute=%s, function=f%d", attribute == HIP_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? "MaxThreadsPerBlock" : "?",
        number_of(function));
  *value = max_threads;
  ANSWER(hipSuccess);
}
hipError_t hipPointerGetAttributes(hipPointerAttribute_t *attributes, const void *address) {
  int index;
  BEGIN("address=0x%llx", (unsigned long long)(uintptr_t)address);
  for (index = 0; index < memory_count; index++) {
    const struct memory *known = &memories[index];
    if ((uintptr_t)address >= known->start && (uintptr_t)address < known->end) {
      memset(attributes, 0, sizeof *attributes);
      attributes->type = (enum hipMemoryType)known->type;
      attributes->device = known->device;
      attributes->isManaged = known->managed;
      ANSWER(hipSuccess);
    }
  }
  ANSWER(hipErrorInvalidValue);
}
hipError_t hipMallocAsync(void **address, size_t bytes, hipStream_t stream) {
  BEGIN("bytes=%zu, stream=0x%llx", bytes, (unsigned long long)(uintptr_t)stream);
  ANSWER_IF_ARRANGED();
  *address = (void *)next_address;
  next_address += 0x1000;
  allocated++;
  say(", address=0x%llx", (unsigned long long)(uintptr_t)*address);
  ANSWER(hipSuccess);
}
hipError_t hipFreeAsync(void *address, hipStream_t stream) {
  BEGIN("address=0x%llx, stream=0x%llx", (unsigned long long)(uintptr_t)address, (unsigned long long)(uintptr_t)stream);
  allocated--;
  ANSWER(hipSuccess);
}

/* ---------------------------------------------------------------------------------------------------------- launches */

static void say_launch(hipFunction_t f, const unsigned *grid, const unsigned *block, unsigned shared, hipStream_t stream,
                       void **parameters) {
  unsigned index, byte;
  say("function=f%d, grid=%u,%u,%u, block=%u,%u,%u, shared=%u, stream=0x%llx, parameters=[", number_of(f), grid[0], grid[1],
      grid[2], block[0], block[1], block[2], shared, (unsigned long long)(uintptr_t)stream);
  for (index = 0; index < parameter_count; index++) {
    say(index ? " " : "");
    for (byte = parameter_sizes[index]; byte-- > 0;)
      say("%02x", ((unsigned char *)parameters[index])[byte]);
  }
  say("]");
}
static int judge(hipFunction_t f, const unsigned *grid, const unsigned *block, unsigned shared, hipStream_t stream, int together) {
  int device = stream == NULL ? current : (int)((uintptr_t)stream - FIRST_STREAM);
  uint64_t threads = (uint64_t)block[0] * block[1] * block[2];
  if ((uint64_t)grid[0] * block[0] > UINT32_MAX || shared > (unsigned)devices[device].shared)
    return hipErrorInvalidValue;
  if (((struct function *)f)->module->device != device)
    return hipErrorInvalidDevice;
  if (threads > (uint64_t)max_threads)
    return hipErrorLaunchFailure;
  if (together && (uint64_t)grid[0] * grid[1] * grid[2] > (uint64_t)max_blocks)
    return hipErrorCooperativeLaunchTooLarge;
  return hipSuccess;
}
hipError_t hipModuleLaunchKernel(hipFunction_t f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                 unsigned int by, unsigned int bz, unsigned int shared, hipStream_t stream, void **parameters,
                                 void **extra) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  BEGIN("");
  say_launch(f, grid, block, shared, stream, parameters);
  if (extra != NULL)
    ANSWER(hipErrorInvalidValue);
  ANSWER(judge(f, grid, block, shared, stream, 0));
}
hipError_t hipModuleLaunchCooperativeKernel(hipFunction_t f, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx,
                                            unsigned int by, unsigned int bz, unsigned int shared, hipStream_t stream,
                                            void **parameters) {
  unsigned grid[3] = {gx, gy, gz}, block[3] = {bx, by, bz};
  BEGIN("");
  say_launch(f, grid, block, shared, stream, parameters);
  ANSWER(judge(f, grid, block, shared, stream, 1));
}
#ifndef LACKING
hipError_t hipDrvLaunchKernelEx(const HIP_LAUNCH_CONFIG *config, hipFunction_t f, void **parameters, void **extra) {
  const unsigned *grid = &config->gridDimX, *block = &config->blockDimX;
  unsigned index;
  int together = 0, known = extra == NULL;
  BEGIN("");
  say_launch(f, grid, block, config->sharedMemBytes, config->hStream, parameters);
  for (index = 0; index < config->numAttrs; index++) {
    const hipLaunchAttribute *attribute = &config->attrs[index];
    const unsigned *value = (const unsigned *)&attribute->val;
    if (attribute->id == hipLaunchAttributeCooperative) {
      say(", cooperative=%u", value[0]);
      together = (int)value[0];
    } else if ((int)attribute->id == 4) { /* the cluster's dimensions, without a name in HIP 7.1 */
      say(", cluster=%u,%u,%u", value[0], value[1], value[2]);
    } else {
      say(", attribute %d", (int)attribute->id);
      known = 0;
    }
  }
  ANSWER(known ? judge(f, grid, block, config->sharedMemBytes, config->hStream, together) : hipErrorInvalidValue);
}
#endif
