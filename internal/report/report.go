// Package report tells the user's logger and trace what happened, in order, in a goroutine of
// its own. They may block, like a pipe without a reader, and nothing that renews, judges or ends
// a term may wait for them.
package report

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// most is how many reports may wait. Further reports are dropped until none waits, so that the
// missing ones form one gap.
const most = 256

// patience is how long Flush waits for a user's func that has not returned.
const patience = time.Second

// Queue calls the user's funcs one after another, in the order in which they were added. Its
// goroutine lives only while there is something to call. All methods are safe for concurrent
// use.
type Queue struct {
	log slog.Handler // is told how many reports were dropped

	mu      sync.Mutex
	waiting []func()
	dropped int           // reports whose loss was not logged yet
	idle    chan struct{} // closed when nothing is left to call; nil: there is nothing to call
	passOn  []*func(*Panic)
}

// Panic is a panic of one of the user's funcs, which the library passes on.
type Panic struct {
	Of    string // what has panicked; empty: the job
	Value any
	Stack []byte // of its goroutine
}

func (p *Panic) Error() string {
	return fmt.Sprintf("tenure: %s panicked: %v\n\n%s", cmp.Or(p.Of, "job"), p.Value, p.Stack)
}

// Unwrap returns the panic's value if it is an error.
func (p *Panic) Unwrap() error {
	err, _ := p.Value.(error)
	return err
}

// Logger returns a logger whose records the queue passes to the handler of the given logger. It
// returns a logger that has a queue already unchanged, so that all its records stay in order.
func Logger(l *slog.Logger) (*slog.Logger, *Queue) {
	if h, ok := l.Handler().(*handler); ok {
		return l, h.queue
	}
	q := &Queue{log: l.Handler()}
	return slog.New(&handler{queue: q, to: func() slog.Handler { return q.log }}), q
}

// Add queues a func to be called soon. It never blocks. If too many funcs are waiting, Add drops
// it.
func (q *Queue) Add(call func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) >= most || q.dropped > 0 {
		q.dropped++
		return
	}
	q.waiting = append(q.waiting, call)
	if q.idle == nil {
		q.idle = make(chan struct{})
		go q.run()
	}
}

func (q *Queue) tellDropped(n int) {
	if !q.log.Enabled(context.Background(), slog.LevelWarn) {
		return
	}
	record := slog.NewRecord(time.Now(), slog.LevelWarn, "the logger or the trace is too slow; reports were dropped", 0)
	record.AddAttrs(slog.Int("dropped", n))
	_ = q.log.Handle(context.Background(), record)
}

// run calls the waiting funcs until none is left.
func (q *Queue) run() {
	returned := false
	defer func() {
		if v := recover(); v != nil {
			q.panicked(&Panic{Of: "the logger or the trace", Value: v, Stack: debug.Stack()})
		}
		if !returned { // also if the func has called runtime.Goexit
			go q.run()
		}
	}()
	for {
		call := q.next()
		if call == nil {
			break
		}
		call()
	}
	returned = true
}

// next returns the func to call next. It returns nil if there is none; then run must end.
func (q *Queue) next() func() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) > 0 {
		call := q.waiting[0]
		q.waiting[0] = nil
		q.waiting = q.waiting[1:]
		return call
	}
	if dropped := q.dropped; dropped > 0 {
		q.dropped = 0
		return func() { q.tellDropped(dropped) }
	}
	close(q.idle)
	q.idle, q.waiting = nil, nil
	return nil
}

// PassOn makes the queue pass each panic of the user's funcs to a func, until stop is called.
// Several coordinators of a lease may each register a func, and all of them are called. While none
// is registered, a panic ends the process, as in any goroutine.
func (q *Queue) PassOn(to func(*Panic)) (stop func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.passOn = append(slices.Clone(q.passOn), &to)
	return func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.passOn = slices.DeleteFunc(slices.Clone(q.passOn), func(other *func(*Panic)) bool { return other == &to })
	}
}

func (q *Queue) panicked(p *Panic) {
	q.mu.Lock()
	all := q.passOn
	q.mu.Unlock()
	if len(all) == 0 {
		panic(fmt.Sprintf("tenure: the logger or the trace panicked: %v\n\n%s", p.Value, p.Stack))
	}
	for _, to := range all {
		(*to)(p)
	}
}

// Flush returns when all funcs that were added before have been called, or when the user's funcs
// have kept it waiting for too long. The rest is called later.
func (q *Queue) Flush() {
	q.mu.Lock()
	idle := q.idle
	q.mu.Unlock()
	if idle == nil {
		return
	}
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-idle:
	case <-timer.C:
	}
}

// Original returns the logger that was given to Logger.
func Original(l *slog.Logger) *slog.Logger {
	if h, ok := l.Handler().(*handler); ok {
		return slog.New(h.to())
	}
	return l
}

// Flush flushes the queue of a logger that Logger has returned.
func Flush(l *slog.Logger) {
	_, q := Logger(l)
	q.Flush()
}

// handler passes records to another handler through a queue. The goroutine that logs calls none
// of that handler's methods.
type handler struct {
	queue *Queue
	to    func() slog.Handler
}

// Enabled always reports true, because only the other handler knows the level.
func (h *handler) Enabled(context.Context, slog.Level) bool { return true }

func (h *handler) Handle(ctx context.Context, r slog.Record) error {
	ctx, r = context.WithoutCancel(ctx), r.Clone()
	h.queue.Add(func() {
		if to := h.to(); to.Enabled(ctx, r.Level) {
			_ = to.Handle(ctx, r)
		}
	})
	return nil
}

func (h *handler) WithAttrs(attrs []slog.Attr) slog.Handler {
	attrs = slices.Clone(attrs)
	return &handler{h.queue, func() slog.Handler { return h.to().WithAttrs(attrs) }}
}

func (h *handler) WithGroup(name string) slog.Handler {
	return &handler{h.queue, func() slog.Handler { return h.to().WithGroup(name) }}
}
