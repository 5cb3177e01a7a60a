// STAND-IN for GDRCopy's library: it knows its version, and finds no device.
#include "gdrapi.h"
#include <stddef.h>
gdr_t gdr_open(void) { return NULL; }
int gdr_close(gdr_t handle) { return handle != NULL; }
void gdr_runtime_get_version(int *major, int *minor) { *major = 2; *minor = 6; }
int gdr_driver_get_version(gdr_t handle, int *major, int *minor) { *major = *minor = 0; return handle == NULL; }
