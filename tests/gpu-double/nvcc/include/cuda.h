// What a source needs of it is in device.h, which every source gets.
#pragma once
#define CUDA_VERSION 13000
