package etcdtenure

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
)

const (
	// groupPatience is how long a write waits for the answer to those before it.
	groupPatience = 2 * time.Millisecond

	// groupsApart is how long all writes are sent alone after the server has refused a group.
	groupsApart = time.Second

	groupAtMost  = 32   // writes; by default, a server allows 128 operations in a transaction
	groupLargest = 4096 // bytes of an object; a larger one is sent alone
)

// errGoAlone means that nothing of a group was written, perhaps because of one of its writes.
var errGoAlone = errors.New("has to be written alone")

// writeGroups let writes of a store that are made at the same moment share a request. A write that arrives
// while none is under way is sent immediately and alone. Writes that arrive in the meantime are sent
// together as soon as that request is answered, or after groupPatience.
//
// Measured with 16 leases that are acquired and released as often as they can, this makes an eighth of the
// requests and takes a third less CPU time, in the client as in the server.
//
// A group is a transaction that has one transaction inside for each write, with its own conditions and
// its own answer. The server evaluates all conditions before the first write, so no write of a group
// may compare or write a key of another.
type writeGroups struct {
	mu      sync.Mutex // guards the fields below, and who of a group has gone; never held across I/O
	sent    int        // requests without an answer, except those of writes that did not fit a group
	waiting *group     // nil: no write waits
	apart   time.Time  // until then each write is sent alone
}

// group is writes that wait, or that were sent together.
type group struct {
	epoch   epoch
	members []*groupedWrite
	keys    map[string]bool
	overdue *time.Timer        // runs while the writes wait
	cancel  context.CancelFunc // ends the request; nil while the writes wait
	done    chan struct{}      // closed when there is an answer
	err     error
}

type groupedWrite struct {
	request
	ctx  context.Context
	gone bool // its caller has given up
	resp *clientv3.TxnResponse
}

// send sends a write, alone or in a group.
func (s *Store) send(ctx context.Context, r request) (*clientv3.TxnResponse, error) {
	gs := &s.groups
	gs.mu.Lock()
	if gs.sent == 0 {
		gs.sent++
		gs.mu.Unlock()
		defer s.answered()
		return s.ask(ctx, r)
	}
	g, w := gs.waiting, &groupedWrite{request: r, ctx: ctx}
	if g == nil {
		g = &group{epoch: r.epoch, keys: make(map[string]bool), done: make(chan struct{})}
	}
	joined := time.Now().After(gs.apart) && g.join(w)
	if joined && gs.waiting == nil {
		gs.waiting, g.overdue = g, time.AfterFunc(groupPatience, s.sendWaiting)
	}
	gs.mu.Unlock()
	if !joined {
		return s.ask(ctx, r)
	}
	select {
	case <-g.done:
	case <-ctx.Done():
		gs.leave(g, w)
		return nil, s.why(ctx, ctx.Err())
	}
	switch {
	case errors.Is(g.err, errGoAlone):
		resp, err := s.ask(ctx, r)
		if err == nil && !resp.Succeeded && r.then[0].IsDelete() && code(g.err) == codes.ResourceExhausted {
			// Out of space, a server answers that even after it has executed a transaction; so does a client if the
			// answer is larger than its limit. A put would recognise itself.
			return nil, errors.New("the delete may have been executed with a group that was answered with an error")
		}
		return resp, err
	case g.err != nil:
		return nil, s.why(ctx, g.err)
	}
	return w.resp, nil
}

// join adds a write to a group that waits, if it fits.
func (g *group) join(w *groupedWrite) bool {
	keys := w.keys()
	if g.epoch != w.epoch || len(g.members) == groupAtMost || len(w.then[0].ValueBytes()) > groupLargest ||
		slices.ContainsFunc(keys, func(key string) bool { return g.keys[key] }) {
		return false
	}
	for _, key := range keys {
		g.keys[key] = true
	}
	g.members = append(g.members, w)
	return true
}

// leave ends the request of a group if its last caller has given up.
func (gs *writeGroups) leave(g *group, w *groupedWrite) {
	gs.mu.Lock()
	defer gs.mu.Unlock()
	w.gone = true
	if g.cancel != nil && len(g.remaining()) == 0 {
		g.cancel()
	}
}

// remaining returns the writes whose callers still wait.
func (g *group) remaining() []*groupedWrite {
	return slices.DeleteFunc(slices.Clone(g.members), func(w *groupedWrite) bool { return w.gone })
}

// answered sends the writes that wait, since a request has been answered.
func (s *Store) answered() {
	s.groups.mu.Lock()
	s.groups.sent--
	s.groups.mu.Unlock()
	s.sendWaiting()
}

// sendWaiting sends the writes that wait, if any.
func (s *Store) sendWaiting() {
	gs := &s.groups
	gs.mu.Lock()
	defer gs.mu.Unlock()
	g := gs.waiting
	if gs.waiting = nil; g == nil {
		return
	}
	g.overdue.Stop()
	members := g.remaining() // if an abandoned acquire were sent, its record would be an orphan
	if len(members) == 0 {
		return
	}
	gs.sent++
	var ctx context.Context
	ctx, g.cancel = context.WithTimeout(context.WithoutCancel(members[0].ctx), requestTimeout) // a write that was given up must not be sent much later
	// The callers of the group's writes wait for this goroutine. When the last of them gives up, ctx ends it.
	go func() {
		defer s.answered()
		defer g.cancel()
		s.sendGroup(ctx, g, members)
	}()
}

func (s *Store) sendGroup(ctx context.Context, g *group, members []*groupedWrite) {
	defer close(g.done)
	// The put is executed only under another epoch, and does no harm. Older servers (before 3.7.3) look for puts, and check the
	// permissions for them, only outside of inner transactions: without it they would execute a group that a newer
	// member of the same cluster refuses.
	r := request{epoch: g.epoch, otherwise: []clientv3.Op{clientv3.OpPut(s.cfg.Prefix+"group", "")}}
	for _, w := range members {
		r.then = append(r.then, clientv3.OpTxn(w.conditions, w.then, w.otherwise))
	}
	resp, err := s.try(ctx, r)
	if refused(err) {
		err = fmt.Errorf("%w: %w", errGoAlone, err)
		s.groups.mu.Lock()
		s.groups.apart = time.Now().Add(groupsApart)
		s.groups.mu.Unlock()
	}
	if g.err = err; err != nil {
		return
	}
	for i, w := range members {
		w.resp = (*clientv3.TxnResponse)(resp.Responses[i].GetResponseTxn())
		w.resp.Header = resp.Header
	}
}

// refused reports whether nothing of a group was written, because the server rejected it.
func refused(err error) bool {
	switch code(err) {
	case codes.InvalidArgument, codes.PermissionDenied, codes.ResourceExhausted:
		return true
	}
	return errors.Is(err, rpctypes.ErrNoLeader)
}
