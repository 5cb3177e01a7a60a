// STAND-IN for GDRCopy's header.
#pragma once
#ifdef __cplusplus
extern "C" {
#endif
typedef struct gdr *gdr_t;
gdr_t gdr_open(void);
int gdr_close(gdr_t handle);
void gdr_runtime_get_version(int *major, int *minor);
int gdr_driver_get_version(gdr_t handle, int *major, int *minor);
#ifdef __cplusplus
}
#endif
