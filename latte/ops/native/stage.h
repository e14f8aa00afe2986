// What every stage of a program has: where its activations and states are, and how its work is cut in pieces.
#pragma once
#include "stages.h"
#include "work.h"

LATTE_BEGIN

constexpr double kEmpty = -1e30;

// One call as the stages see it.
template <class T>
struct Frame {
    const Call& g;
    int64_t rows;  // B * T; row t * B + b is token t of row b of the batch
    T* partial;    // room for attention to parts of long rows

    T* at(int64_t buffer) const {
        if (buffer == kOutput) return (T*)g.output;
        return buffer < 0 ? nullptr : (T*)g.room + buffer * rows;
    }
    // A part of the state before token t, and after it.
    template <class U = T>
    const U* before(int64_t t, int64_t part) const {
        return (const U*)((t ? (const char*)g.after + (t - 1) * g.block : (const char*)g.before) + part * g.B);
    }
    template <class U = T>
    U* after(int64_t t, int64_t part) const {
        return (U*)((char*)g.after + t * g.block + part * g.B);
    }
    int64_t place(int64_t t, int64_t b) const { return ((const int64_t*)g.count)[b] + t; }
    const Memory& memory(int64_t index) const { return ((const Memory*)g.memory)[index]; }
};

// A stage of one call. Every thread has its own, takes pieces of it until there are none, and keeps scratch memory between them.
template <class T>
class Task {
  public:
    virtual ~Task() {}
    // Tasks are made in memory that is there; the library's own operators may be compiled for another instruction set.
    static void* operator new(size_t, void* at) { return at; }
    static void operator delete(void*) {}
    virtual int64_t pieces() const = 0;
    virtual void run(int64_t piece) = 0;
};

// The task of a stage, by its fields.
template <class Fields, class T>
class Stage;

LATTE_END
