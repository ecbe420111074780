// Package queuehttp serves a queue of package claims over HTTP, to workers that cannot reach the database.
//
// A [Handler] is an [http.Handler] for one queue. Any number of servers may have handlers of the same queue.
// They keep nothing in memory, and a worker may send each request to a different server. A [Client] is a worker
// in Go. Workers in other languages speak the protocol below.
//
// A worker works on several tasks at once, under a session of its own, which its heartbeats renew. A task is a
// row of the queue, with its claim and what [Config.Payloads] returns for it. If a worker dies, other workers
// get its tasks a TTL later. If the queue has [claims.QueueConfig.Expires], each task also has a lease of its own, which
// heartbeats do not extend: a task that hangs is another worker's once its lease has run out. A result that comes too
// late is refused. The database decides what is too late, whatever the servers and workers believe.
//
// # Protocol
//
// All requests are POST, and bodies are JSON. A worker ignores names that it does not know; a server refuses a
// request that has some, except within SESSION and CLAIM. SESSION is the object that begin returned, and is sent
// back as it is.
//
//	wait       {}                                                {"ready": true}: there may be a task
//	begin      {"holder": NAME}                                  {"session": SESSION}
//	heartbeat  {"session": SESSION, "have": [CLAIM, …]}          {"ended": [CLAIM, …]}: the claims of have that have ended
//	take       {"session": SESSION, "n": 8, "have": [CLAIM, …]}  {"tasks": [{"claim": CLAIM, "payload": …}, …], "lease_seconds": 60}
//	extend     {"claims": [CLAIM, …], "lease_seconds": 60}       {}
//	finish     {"results": [{"claim": CLAIM, "result": …}, …]}   {}
//	nack       {"claims": [CLAIM, …], "after_seconds": 5}        {}
//	abandon    {"claims": [CLAIM, …]}                            {}
//	goodbye    {"session": SESSION}                              {}
//
// These are optional: "lease_seconds" of a take and an extend, which only a queue with leases has; "filter" of a wait and a
// take, an object of strings such as {"tenant": "acme"}, if the server has [Config.Filter]; "again": true of a take;
// and "each": true of a finish.
//
// A worker sends a heartbeat three times per ttl_seconds of its session. It trusts the session for ttl_seconds,
// less a thirtieth, counted from just before it sent the last begin or heartbeat that was answered. After that
// it stops its work. It sends one take at a time, with all claims that it has; if there is no task, the server
// waits for one for up to five seconds, or a sixth of the TTL if that is less. It has a claim until its finish, nack or abandon is answered with
// 200, 400 or 409, except claims that the answer lists as refused, or until the answer to a heartbeat says that the claim has ended. Tasks whose answer was
// lost come with the next take. A take that repeats one which was answered with no task is sent with "again": it waits with
// the others, and costs the database nothing. But after a take that was not answered, one without "again" must have been
// answered first that was sent at least ttl_seconds later.
// A worker stops its work on a task when the lease that the take has answered, which includes the time that it waited, has
// run out, less a thirtieth, counted from just before it sent the take, or the extend that was answered last.
//
// A worker without a task needs no session. It begins one when a wait has been answered with ready, which takes as long as
// a take and costs the database nothing while others wait as well.
//
// Nack gives tasks back and holds them back for a while, by default for [claims.QueueConfig.Backoff]. Abandon gives them
// back for others to take at once. Extend, finish, nack and abandon apply to all of their claims, or to none. A finish of
// each result finishes those that it can: "ended" of its answer lists the claims that had ended, and "refused", as
// {"claim": CLAIM, "error": TEXT}, the results that are invalid, whose tasks the worker still has. An extend never shortens
// a lease.
//
// Each request may be repeated. Errors are {"error": TEXT}, with a status:
//
//	400, 413  the request is wrong, has a field that is not known, or is too large: the text says what to change
//	409       the session or a claim has ended; "ended" lists the claims, and is missing if it is the session
//	503       the store can't be used now: repeat the request, also at another server
//
// If the answer to a finish, nack, abandon or goodbye was lost, and the request had been obeyed, the answer to
// its repetition is 409; that of a finish of each result lists as ended what was finished before.
package queuehttp

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/claims"
	"github.com/tenurelib/tenure/internal/seconds"
)

// Task is a claim on a row, and what [Config.Payloads] returned for the row.
type Task struct {
	Claim   claims.Claim    `json:"claim"`
	Payload json.RawMessage `json:"payload"`

	extend func(ctx context.Context, d time.Duration) error // of a [Client]
}

// Extend makes the lease of a task that [Client.Serve] has taken end d from now, if its queue has leases. The server limits
// d. If the claim has ended, the error is [tenure.ErrLost], and the context of the task's func ends. After any other error
// except [tenure.ErrInvalid] the lease may have been extended; Extend may be called again. It is safe for concurrent use.
func (t Task) Extend(ctx context.Context, d time.Duration) error {
	if t.extend == nil {
		return fmt.Errorf("queuehttp: extend %s: %w: it is no task of Client.Serve", t.Claim, tenure.ErrInvalid)
	}
	return t.extend(ctx, d)
}

// Result is what a worker made of a task.
type Result struct {
	Claim  claims.Claim    `json:"claim"`
	Result json.RawMessage `json:"result,omitempty"`
}

// session is a worker's session. Only the worker knows the term, so no other process renews it.
type session struct {
	ID    string           `json:"id"`
	Term  string           `json:"term"`
	Token int64            `json:"token"`
	TTL   seconds.Duration `json:"ttl_seconds"`
}

// request is the body of any request.
type request struct {
	Holder  string            `json:"holder,omitempty"`
	Session *session          `json:"session,omitempty"`
	N       int               `json:"n,omitempty"`
	Have    []claims.Claim    `json:"have,omitempty"`
	Again   bool              `json:"again,omitempty"`
	Filter  map[string]string `json:"filter,omitempty"`
	Lease   *seconds.Duration `json:"lease_seconds,omitempty"`
	Results []Result          `json:"results,omitempty"`
	Each    bool              `json:"each,omitempty"`
	Claims  []claims.Claim    `json:"claims,omitempty"`
	After   *seconds.Duration `json:"after_seconds,omitempty"`
}

// answer is the body of any answer.
type answer struct {
	Ready   bool              `json:"ready,omitempty"`
	Session *session          `json:"session,omitempty"`
	Tasks   []Task            `json:"tasks,omitempty"`
	Lease   *seconds.Duration `json:"lease_seconds,omitempty"`
	Ended   []claims.Claim    `json:"ended,omitempty"`
	Refused []refused         `json:"refused,omitempty"`
	Error   string            `json:"error,omitempty"`
}

// refused is a result that is invalid.
type refused struct {
	Claim claims.Claim `json:"claim"`
	Error string       `json:"error"`
}
