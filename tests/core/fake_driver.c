/* A libcuda.so.1 that launches nothing and keeps what the last launch was given. */
#include <cuda.h>
#include <stdint.h>
#include <string.h>

static struct {
    uint64_t launches, function, stream, grid[3], threads, shared_bytes, attributes;
    uint64_t ids[4], values[4];
    uint64_t first[8];
} seen;
static int arguments_read; /* a launch does not say how many it has */

static CUresult next_status = CUDA_SUCCESS;

void fake_failure(int status) { next_status = status; }

void *fake_seen(int arguments) {
    arguments_read = arguments;
    return &seen;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction f, void **params, void **extra) {
    CUresult failure = next_status;
    next_status = CUDA_SUCCESS;
    if (failure != CUDA_SUCCESS) return failure;
    uint64_t grid[3] = {config->gridDimX, config->gridDimY, config->gridDimZ};
    seen.launches += 1;
    seen.function = (uint64_t)f;
    seen.stream = (uint64_t)config->hStream;
    memcpy(seen.grid, grid, sizeof grid);
    seen.threads = config->blockDimX * config->blockDimY * config->blockDimZ;
    seen.shared_bytes = config->sharedMemBytes;
    seen.attributes = config->numAttrs;
    for (unsigned i = 0; i < config->numAttrs && i < 4; i++) {
        seen.ids[i] = config->attrs[i].id;
        memcpy(&seen.values[i], &config->attrs[i].value, 8);
    }
    for (int i = 0; i < arguments_read; i++) memcpy(&seen.first[i], params[i], 8);
    return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = (CUcontext)1;
    return CUDA_SUCCESS;
}

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    memcpy(data, &pointer, sizeof pointer);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice *device, int n) { return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *c, CUdevice d) { return CUDA_SUCCESS; }
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { return CUDA_SUCCESS; }
CUresult cuFuncSetAttribute(CUfunction f, CUfunction_attribute a, int n) { return CUDA_SUCCESS; }

static CUresult nothing(void) { return CUDA_SUCCESS; }

/* How cuda.bindings finds the others. */
CUresult cuGetProcAddress(const char *name, void **found, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *status) {
    *found = (void *)nothing;
    if (!strcmp(name, "cuLaunchKernelEx")) *found = (void *)cuLaunchKernelEx;
    if (!strcmp(name, "cuGetProcAddress")) *found = (void *)cuGetProcAddress;
    return CUDA_SUCCESS;
}
