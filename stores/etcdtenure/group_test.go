//go:build unix

package etcdtenure_test

import (
	"context"
	crand "crypto/rand"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/etcdtenure"
)

type txnFunc = func(context.Context, *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error)

// openThrough returns a store whose transactions pass through a func on their way to a server.
func openThrough(t *testing.T, url string, pass func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error)) *etcdtenure.Store {
	t.Helper()
	behind := etcdserverpb.NewKVClient(connect(t, url).ActiveConnection())
	send := func(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		return behind.Txn(ctx, r)
	}
	f := &fake{version: "3.7.3", kv: behind, txn: func(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		return pass(ctx, r, send)
	}}
	return openOn(t, connect(t, f.start(t)), etcdtenure.Config{})
}

// members returns how many writes a request has if it is a group, otherwise 0.
func members(r *etcdserverpb.TxnRequest) (n int) {
	for _, op := range r.Success {
		if op.GetRequestTxn() != nil {
			n++
		}
	}
	return n
}

// atOnce calls a func for each of n writers, all at the same time.
func atOnce(n int, write func(i int)) {
	var all sync.WaitGroup
	begin := make(chan struct{})
	for i := range n {
		all.Go(func() { <-begin; write(i) })
	}
	close(begin)
	all.Wait()
}

func widget(i int) tenure.Key { return tenure.Key{Type: "widget", ID: fmt.Sprint(i)} }

// Another process has changed every other object, which this store does not know.
func TestWritesOfTheSameMomentShareARequestAndEachHasItsOwnAnswer(t *testing.T) {
	t.Parallel()
	var mixed atomic.Int32 // groups of which some writes were refused
	url := start(t).client
	other, store := open(t, url), openThrough(t, url, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		resp, err := send(ctx, r)
		if err == nil && members(r) > 1 {
			written := 0
			for _, op := range resp.Responses {
				if op.GetResponseTxn().Succeeded {
					written++
				}
			}
			if written > 0 && written < members(r) {
				mixed.Add(1)
			}
		}
		return resp, err
	})
	const writers = 12
	var objs [writers]tenure.Object
	for i := range objs {
		var err error
		objs[i], err = store.PutIf(t.Context(), tenure.Object{Key: widget(i), Name: fmt.Sprint("name ", i)}, tenure.IfAbsent())
		require.NoError(t, err)
	}
	for round := 0; mixed.Load() < 10; round++ {
		var written, current [writers]tenure.Object
		var errs [writers]error
		var late [writers]bool // by chance, since a pattern could be the same in reverse
		for i := range writers {
			if late[i] = rand.IntN(2) == 0; !late[i] {
				continue
			}
			var err error
			current[i], err = other.PutIf(t.Context(), tenure.Object{Key: objs[i].Key, Name: objs[i].Name, Payload: fmt.Append(nil, "other ", round)}, tenure.Unconditional())
			require.NoError(t, err)
		}
		atOnce(writers, func(i int) {
			obj := objs[i]
			obj.Payload = fmt.Append(nil, i, " ", round)
			if i%4 < 2 {
				written[i], errs[i] = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
			} else if errs[i] = store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)); errs[i] == nil {
				written[i], errs[i] = store.PutIf(t.Context(), obj, tenure.IfAbsent())
			}
		})
		for i := range writers {
			if late[i] {
				require.ErrorIs(t, errs[i], tenure.ErrConflict)
			} else {
				require.NoError(t, errs[i])
				require.Equal(t, fmt.Sprint(i, " ", round), string(written[i].Payload))
				current[i] = written[i]
			}
			is, err := other.Get(t.Context(), objs[i].Key)
			require.NoError(t, err)
			require.Equal(t, current[i], is)
		}
		objs = current
	}
}

// After Canceled the client sends a request again by itself.
func TestEachWriteOfAGroupWhoseAnswerAProxyHasCancelledIsRecognised(t *testing.T) {
	t.Parallel()
	var cancelled atomic.Int32
	url := start(t).client
	other, store := open(t, url), openThrough(t, url, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		resp, err := send(ctx, r)
		if err == nil && members(r) > 1 && resp.Responses[0].GetResponseTxn().Succeeded {
			cancelled.Add(1)
			return nil, status.Error(codes.Canceled, "the proxy's connection has ended")
		}
		return resp, err
	})
	for round := 0; cancelled.Load() < 5; round++ {
		atOnce(12, func(i int) {
			written, err := store.PutIf(t.Context(), tenure.Object{Key: widget(i), Payload: fmt.Append(nil, round)}, tenure.Unconditional())
			if err != nil {
				t.Error(err)
				return
			}
			if is, err := other.Get(t.Context(), widget(i)); err != nil || is.Version != written.Version || string(is.Payload) != fmt.Sprint(round) {
				t.Errorf("%v is not %v (%v)", is, written, err)
			}
		})
	}
}

// It may have been executed, and a second request would find that another write came first.
func TestAGroupWithoutAnAnswerIsNotSentAgain(t *testing.T) {
	t.Parallel()
	var unanswered, failed atomic.Int32 // writes
	store := openThrough(t, start(t).client, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		resp, err := send(ctx, r)
		if err == nil && members(r) > 1 {
			unanswered.Add(int32(members(r)))
			return nil, rpctypes.ErrGRPCTimeout
		}
		return resp, err
	})
	for unanswered.Load() < 20 {
		atOnce(12, func(i int) {
			if err := put(t.Context(), store, widget(i)); err != nil {
				assert.ErrorIs(t, err, rpctypes.ErrTimeout)
				failed.Add(1)
			}
		})
	}
	require.Equal(t, unanswered.Load(), failed.Load())
}

// arrival is a request that a server holds.
type arrival struct {
	members int
	ctx     context.Context
}

// holding is a server that holds the requests that arrive.
type holding struct {
	arrivals chan arrival
	until    atomic.Pointer[chan struct{}] // closed when it executes them; nil: it holds none
}

func openHolding(t *testing.T) (*holding, *etcdtenure.Store) {
	h := &holding{arrivals: make(chan arrival, 10)}
	return h, openThrough(t, start(t).client, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		if until := h.until.Load(); until != nil {
			h.arrivals <- arrival{members(r), ctx}
			select {
			case <-*until:
			case <-ctx.Done():
			}
		}
		return send(ctx, r)
	})
}

func (h *holding) next(t *testing.T) (a arrival) {
	t.Helper()
	select {
	case a = <-h.arrivals:
	case <-time.After(testkit.Patience):
		t.Fatal("no request has arrived")
	}
	return a
}

// A write that waits for a slow one is sent before that one is answered.
func TestACallerThatGivesUpLeavesItsGroupToTheOthers(t *testing.T) {
	t.Parallel()
	h, store := openHolding(t)
	for _, giveUp := range []int{1, 2} {
		for tested := false; !tested; {
			until := make(chan struct{})
			h.until.Store(&until)
			var all sync.WaitGroup
			all.Go(func() { assert.NoError(t, put(t.Context(), store, widget(0))) })
			h.next(t)
			var cancels [2]context.CancelFunc
			var errs [2]chan error
			for i := range errs {
				errs[i] = make(chan error, 1)
				ctx, cancel := context.WithCancel(t.Context())
				cancels[i] = cancel
				all.Go(func() { errs[i] <- put(ctx, store, widget(1+i)) })
			}
			if group := h.next(t); group.members == 2 {
				for i := range giveUp {
					cancels[i]()
					require.ErrorIs(t, <-errs[i], context.Canceled)
				}
				tested = true
				if giveUp == 2 {
					testkit.Await(t, "the request ends", func() bool { return group.ctx.Err() != nil })
				} else {
					require.NoError(t, group.ctx.Err())
				}
			} else {
				h.next(t)
			}
			h.until.Store(nil)
			close(until)
			if tested && giveUp == 1 {
				require.NoError(t, <-errs[1])
			}
			all.Wait()
			cancels[0]()
			cancels[1]()
		}
	}
}

// Otherwise the record of an abandoned acquire would stand until it expires.
func TestAWriteWhoseCallerGivesUpWhileItWaitsIsNotSent(t *testing.T) {
	t.Parallel()
	h, store := openHolding(t)
	for range 50 {
		until := make(chan struct{})
		h.until.Store(&until)
		var all sync.WaitGroup
		all.Go(func() { assert.NoError(t, put(t.Context(), store, widget(0))) })
		h.next(t)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(rand.N(2*time.Millisecond), cancel)
		require.ErrorIs(t, put(ctx, store, widget(1)), context.Canceled)
		select {
		case sent := <-h.arrivals: // before its caller gave up
			testkit.Await(t, "the request ends", func() bool { return sent.ctx.Err() != nil })
		case <-time.After(10 * time.Millisecond):
		}
		h.until.Store(nil)
		close(until)
		all.Wait()
	}
}

func put(ctx context.Context, store tenure.Store, key tenure.Key) error {
	_, err := store.PutIf(ctx, tenure.Object{Key: key, Payload: []byte(crand.Text())}, tenure.Unconditional())
	return err
}

// Each write has as many operations as this server allows.
func TestAGroupThatTheServerRefusesIsWrittenOneByOne(t *testing.T) {
	t.Parallel()
	var refused, sent atomic.Int32
	store := openThrough(t, start(t, "--max-txn-ops", "3").client, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		resp, err := send(ctx, r)
		if sent.Add(1); members(r) > 0 && err != nil {
			refused.Add(1)
		}
		return resp, err
	})
	for round := 0; refused.Load() == 0; round++ {
		atOnce(12, func(i int) { assert.NoError(t, put(t.Context(), store, widget(i))) })
	}
	// For a second, there are no groups.
	had, began := refused.Load(), time.Now()
	for time.Since(began) < 500*time.Millisecond {
		require.Equal(t, had, refused.Load())
		atOnce(12, func(i int) { assert.NoError(t, put(t.Context(), store, widget(i))) })
	}
}

// All conditions of a group hold before its first write, so two deletions in one group would both succeed.
func TestOfTwoDeletionsAtTheSameMomentOneFindsNothing(t *testing.T) {
	t.Parallel()
	var groups atomic.Int32
	store := openThrough(t, start(t).client, func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		if members(r) > 1 {
			groups.Add(1)
		}
		return send(ctx, r)
	})
	const objects = 6
	for round := 0; round < 20 || groups.Load() < 20; round++ {
		var versions [objects]int64
		for i := range versions {
			obj, err := store.PutIf(t.Context(), tenure.Object{Key: widget(i)}, tenure.IfAbsent())
			require.NoError(t, err)
			versions[i] = obj.Version
		}
		var errs [2 * objects]error
		atOnce(len(errs), func(i int) { errs[i] = store.DeleteIf(t.Context(), widget(i/2), tenure.IfVersion(versions[i/2])) })
		for i := range objects {
			first, second := errs[2*i], errs[2*i+1]
			if first != nil {
				first, second = second, first
			}
			require.NoError(t, first)
			require.ErrorIs(t, second, tenure.ErrNotFound)
		}
	}
}

// blockFirst returns a func for openThrough that holds back the first request after it is armed until release is called, so that
// the writes in the meantime form a group, with which group is called.
func blockFirst(group txnFunc) (pass func(context.Context, *etcdserverpb.TxnRequest, txnFunc) (*etcdserverpb.TxnResponse, error), arm, release func(), blocked <-chan struct{}) {
	var armed, first atomic.Bool
	held, let := make(chan struct{}), make(chan struct{})
	return func(ctx context.Context, r *etcdserverpb.TxnRequest, send txnFunc) (*etcdserverpb.TxnResponse, error) {
		switch {
		case armed.Load() && members(r) > 0:
			return group(ctx, r)
		case armed.Load() && first.CompareAndSwap(false, true):
			close(held)
			<-let
		}
		return send(ctx, r)
	}, func() { armed.Store(true) }, func() { close(let) }, held
}

// A transaction may have been executed although the answer is ResourceExhausted.
func TestADeleteThatItsGroupMayHaveExecutedIsNotTakenForMissing(t *testing.T) {
	t.Parallel()
	for name, answer := range map[string]error{
		"the space is used up":               rpctypes.ErrGRPCNoSpace,
		"the answer is too large to receive": status.Error(codes.ResourceExhausted, "grpc: received message larger than max"),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			deletesInAGroupAnsweredWith(t, answer)
		})
	}
}

func deletesInAGroupAnsweredWith(t *testing.T, answer error) {
	url := start(t).client
	behind := etcdserverpb.NewKVClient(connect(t, url).ActiveConnection())
	pass, arm, release, blocked := blockFirst(func(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		puts := 0
		for _, op := range r.Failure {
			if op.GetRequestPut() != nil {
				puts++
			}
		}
		assert.Equal(t, 1, puts, "by which older servers see that the group writes")
		if _, err := behind.Txn(ctx, r); err != nil {
			return nil, err
		}
		return nil, answer
	})
	store := openThrough(t, url, pass)
	var objs [3]tenure.Object
	for i := range objs {
		var err error
		objs[i], err = store.PutIf(t.Context(), tenure.Object{Key: widget(i)}, tenure.IfAbsent())
		require.NoError(t, err)
	}
	arm()
	var all sync.WaitGroup
	put := func(i int) {
		_, err := store.PutIf(t.Context(), tenure.Object{Key: objs[i].Key, Payload: []byte("x")}, tenure.IfVersion(objs[i].Version))
		assert.NoError(t, err, "it recognises itself")
	}
	all.Go(func() { put(0) })
	<-blocked
	all.Go(func() { put(2) })
	err := store.DeleteIf(t.Context(), objs[1].Key, tenure.IfVersion(objs[1].Version))
	release()
	all.Wait()
	if err != nil { // it is nil if the two came more than groupPatience apart
		require.ErrorContains(t, err, "may have been executed")
		require.NotErrorIs(t, err, tenure.ErrNotFound)
		require.NotErrorIs(t, err, tenure.ErrSetup)
	}
}

// A write that was given up may be sent with its group, but not much later.
func TestAGroupIsGivenUpWhenAWriteAloneWouldBe(t *testing.T) {
	t.Parallel()
	ended := make(chan struct{})
	pass, arm, release, blocked := blockFirst(func(ctx context.Context, _ *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		<-ctx.Done()
		close(ended)
		return nil, ctx.Err()
	})
	store := openThrough(t, start(t).client, pass)
	arm()
	var all sync.WaitGroup
	defer all.Wait()
	long, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
	defer cancel()
	put := func(ctx context.Context, i int) {
		_, _ = store.PutIf(ctx, tenure.Object{Key: widget(i)}, tenure.IfAbsent())
	}
	all.Go(func() { put(long, 0) })
	<-blocked
	defer release()
	all.Go(func() { put(long, 1) })
	select {
	case <-ended:
	case <-time.After(testkit.Patience):
		t.Error("the request goes on as long as its caller waits")
	}
	cancel()
}
