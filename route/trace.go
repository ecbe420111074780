package route

import "time"

// Trace has funcs that a [Route] calls. Any of them may be nil. Many goroutines may call Request at the same time.
type Trace struct {
	// Request is called once for each request that a client has sent to this process, when its outcome is known. A forwarded
	// request is reported only by the process that forwards it. The goroutine of the request calls the func, so the client may
	// wait until the func has returned. No other request, and no key, waits for it.
	Request func(Request)

	// Created is called once, by [Lease], [Keys] or [Shards], with the route that they return, for example to read its
	// [Route.Status] from then on.
	Created func(*Route)
}

func (t *Trace) created(rt *Route) {
	if t != nil && t.Created != nil {
		t.Created(rt)
	}
}

// Request is what became of a request.
type Request struct {
	Key     string
	Outcome string        // "answered", "refused" or "unknown"
	Sends   int           // how often the request was sent to another process; 0 if it was answered: this process did
	Waited  time.Duration // until this process began to answer, or last began to send the request, or refused it
	Took    time.Duration // in all
	Err     error         // why the request was refused, or the answer of another process is missing
}

// Status is the state of a [Route] at a moment.
type Status struct {
	Waiting int // requests that wait for an owner, or for an owner's answer
	Running int // requests that a handler answers in this process
	Keys    int // keys that this process remembers
}

// Status returns the state of the route. It does no I/O.
func (rt *Route) Status() Status {
	rt.mu.Lock()
	defer rt.mu.Unlock()
	return Status{rt.waiting + len(rt.pending), rt.running, len(rt.entries)}
}
