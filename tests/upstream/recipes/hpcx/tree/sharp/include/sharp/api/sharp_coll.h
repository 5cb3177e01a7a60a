// STAND-IN
#pragma once
int sharp_coll_init(void);
int sharp_coll_finalize(void);
