//go:build unix

package etcdtenure_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	crand "crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/etcdtenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoreKeepsTheContract(t *testing.T) {
	client := connect(t, start(t).client)
	stores := 0
	storetest.Run(t, func(t *testing.T) tenure.Store {
		stores++
		return openOn(t, client, etcdtenure.Config{Prefix: fmt.Sprint("s", stores, "/")})
	})
}

func TestOnlyPublicPackagesOfTheRootModuleAreImported(t *testing.T) { testkit.OnlyPublicImports(t) }

func TestANameMovesOnlyFromAnObjectThatHasGivenItUp(t *testing.T) {
	testkit.RunNamesMove(t, open(t, start(t).client))
}

func TestConcurrentWritersNeverGiveOneNameTwice(t *testing.T) {
	url := start(t).client
	testkit.RunNamesAreGivenOnce(t, func() *etcdtenure.Store { return open(t, url) })
}

func TestAKeyOfAnyLengthIsListed(t *testing.T) {
	testkit.RunKeysAreListed(t, open(t, start(t).client))
}

// An object that is removed by hand leaves the claim to its name behind.
func TestANameOfAnObjectThatWasRemovedByHandIsFree(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	put := func(id, name string) error {
		_, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: id}, Name: name}, tenure.Unconditional())
		return err
	}
	for _, id := range []string{"b", "a"} {
		require.NoError(t, put("a", "x"))
		require.ErrorIs(t, put("b", "x"), tenure.ErrTaken)
		_, err := client.Delete(t.Context(), "tenure/o/widget/a")
		require.NoError(t, err)
		require.NoError(t, put(id, "x"))
		if id == "b" {
			require.ErrorIs(t, put("a", "x"), tenure.ErrTaken)
			require.NoError(t, put("b", "y"))
		}
	}
}

func TestADeletedObjectLeavesNothing(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	for i := range 3 {
		obj, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Name: fmt.Sprint(i)}, tenure.IfAbsent())
		require.NoError(t, err)
		obj.Name += "!"
		obj, err = store.PutIf(t.Context(), obj, tenure.IfVersion(obj.Version))
		require.NoError(t, err)
		require.NoError(t, store.DeleteIf(t.Context(), obj.Key, tenure.IfVersion(obj.Version)))
	}
	is, err := client.Get(t.Context(), "", clientv3.WithPrefix())
	require.NoError(t, err)
	require.Len(t, is.Kvs, 1)
	require.Equal(t, "tenure/epoch", string(is.Kvs[0].Key))
}

func TestAValueOfAnotherProgramIsAnObjectOfUnknownContent(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	_, err := client.Put(t.Context(), "tenure/o/reconciler_lease/singleton", "held by me")
	require.NoError(t, err)
	_, err = client.Put(t.Context(), "tenure/o/reconciler_lease/", "nobody's")
	require.NoError(t, err)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 500 * time.Millisecond})
	_, err = lease.AcquireOrSteal(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
	require.ErrorContains(t, err, "unknown")
	obj, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	require.Equal(t, "held by me", string(obj.Payload))
	found, err := store.List(t.Context(), lease.Key().Type, "", 1)
	require.NoError(t, err)
	require.Len(t, found, 1)
	time.Sleep(500 * time.Millisecond)
	_, err = lease.AcquireOrSteal(t.Context())
	require.NoError(t, err)
}

func TestAnObjectThatIsTooLargeForTheServerIsRefused(t *testing.T) {
	t.Parallel()
	store := open(t, start(t, "--max-request-bytes", "1048576").client)
	obj := tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Payload: make([]byte, tenure.MaxPayload-4096)}
	_, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
	require.NoError(t, err)
	obj.Payload = make([]byte, tenure.MaxPayload)
	_, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "max-request-bytes")
	obj.Payload = nil
	obj.Labels = map[string]string{"a": strings.Repeat("x", 3<<20)} // more than the client sends
	_, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

func TestAFullServerIsNamedAndGoesOnWhenItIsRepaired(t *testing.T) {
	t.Parallel()
	s := start(t, "--quota-backend-bytes", fmt.Sprint(16<<20))
	client, store := connect(t, s.client), open(t, s.client)
	key := tenure.Key{Type: "widget", ID: "a"}
	var err error
	for range 100 {
		if _, err = store.PutIf(t.Context(), tenure.Object{Key: key, Payload: make([]byte, tenure.MaxPayload)}, tenure.Unconditional()); err != nil {
			break
		}
	}
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "compact")
	is, err := store.Get(t.Context(), key)
	require.NoError(t, err)
	at, err := client.Get(t.Context(), "x")
	require.NoError(t, err)
	_, err = client.Compact(t.Context(), at.Header.Revision, clientv3.WithCompactPhysical())
	require.NoError(t, err)
	_, err = client.Defragment(t.Context(), s.client)
	require.NoError(t, err)
	_, err = client.AlarmDisarm(t.Context(), &clientv3.AlarmMember{})
	require.NoError(t, err)
	_, err = store.PutIf(t.Context(), tenure.Object{Key: key}, tenure.IfVersion(is.Version))
	require.NoError(t, err)
}

func TestAConfigThatCannotBeIsRefused(t *testing.T) {
	t.Parallel()
	_, err := etcdtenure.New(nil, etcdtenure.Config{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	client := connect(t, "http://127.0.0.1:1")
	_, err = etcdtenure.New(client, etcdtenure.Config{Prefix: "a"})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "Prefix")
	for _, url := range []string{"", "etcd://", "http://host:1", "etcd://host:x", "etcd://user:sec/ret:secret@host", "etcd://secret@host", "etcd://host?x=secret", "etcd://host?ca=secret", "etcds://host?ca=/none", "%secret"} {
		_, err := etcdtenure.Open(t.Context(), url, clientv3.Config{}, etcdtenure.Config{})
		require.ErrorIs(t, err, tenure.ErrInvalid, url)
		require.ErrorContains(t, err, "etcd")
		require.NotContains(t, err.Error(), "secret")
	}
	_, err = etcdtenure.Open(t.Context(), "etcd://host", clientv3.Config{TLS: new(tls.Config)}, etcdtenure.Config{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "etcds://")
}

func TestAURLNamesServersAndThePrefix(t *testing.T) {
	t.Parallel()
	s := start(t)
	url := "etcd://127.0.0.1:1," + strings.TrimPrefix(s.client, "http://") + "/a/b"
	store, err := etcdtenure.Open(t.Context(), url, clientv3.Config{Logger: zap.NewNop()}, etcdtenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	require.NoError(t, store.Migrate(t.Context()))
	is, err := connect(t, s.client).Get(t.Context(), "a/b/epoch")
	require.NoError(t, err)
	require.Len(t, is.Kvs, 1)
	require.NoError(t, store.Close())
	_, err = store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
	require.Error(t, err)
}

func TestWithoutMigrateTheErrorSaysWhatToDo(t *testing.T) {
	t.Parallel()
	store, err := etcdtenure.New(connect(t, start(t).client), etcdtenure.Config{})
	require.NoError(t, err)
	defer store.Close()
	_, err = store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "Migrate")
}

func TestMigrateMayBeCalledByManyAtOnce(t *testing.T) {
	t.Parallel()
	client := connect(t, start(t).client)
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			store, err := etcdtenure.New(client, etcdtenure.Config{})
			if err == nil {
				err = store.Migrate(t.Context())
			}
			if err != nil {
				t.Error(err)
			}
			_ = store.Close()
		})
	}
	all.Wait()
	is, err := client.Get(t.Context(), "tenure/epoch")
	require.NoError(t, err)
	require.EqualValues(t, 1, is.Kvs[0].Version)
}

// fake is a server that answers as a test wants.
type fake struct {
	etcdserverpb.UnimplementedMaintenanceServer
	etcdserverpb.UnimplementedKVServer
	version string
	txn     func(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error)
	kv      etcdserverpb.KVClient // that answers reads; nil: this server
}

func (f *fake) Status(context.Context, *etcdserverpb.StatusRequest) (*etcdserverpb.StatusResponse, error) {
	return &etcdserverpb.StatusResponse{Header: new(etcdserverpb.ResponseHeader), Version: f.version}, nil
}

// Range returns the epoch, whatever the key, if there is no other server behind this one.
func (f *fake) Range(ctx context.Context, r *etcdserverpb.RangeRequest) (*etcdserverpb.RangeResponse, error) {
	if f.kv != nil {
		return f.kv.Range(ctx, r)
	}
	resp := new(etcdserverpb.RangeResponse)
	err := json.Unmarshal([]byte(`{"header":{"cluster_id":1,"revision":5},"kvs":[{"value":"eyJhYm92ZSI6MSwiY2x1c3RlciI6IjEifQ=="}]}`), resp)
	return resp, err
}

func (f *fake) Txn(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
	return f.txn(ctx, r)
}

func (f *fake) start(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	s := grpc.NewServer()
	etcdserverpb.RegisterMaintenanceServer(s, f)
	etcdserverpb.RegisterKVServer(s, f)
	go func() { _ = s.Serve(l) }()
	t.Cleanup(s.Stop)
	return "http://" + l.Addr().String()
}

// No real server of that age is available.
func TestAServerThatIsTooOldIsRefused(t *testing.T) {
	t.Parallel()
	for version, ok := range map[string]bool{"3.4.36": false, "3.5.2": false, "3.5.3": true, "3.7.3": true, "4.0.0-rc.1": true} {
		f := &fake{version: version}
		store, err := etcdtenure.New(connect(t, f.start(t)), etcdtenure.Config{Logger: testkit.Quiet})
		require.NoError(t, err)
		defer store.Close()
		if err = store.Migrate(t.Context()); ok {
			require.NoError(t, err, version)
			continue
		}
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "3.5.3")
	}
}

// The client sends a transaction again if the server says DeadlineExceeded, even one that was
// executed. The second one would then fail, as if another write had come first.
func TestAWriteIsNotSentTwice(t *testing.T) {
	t.Parallel()
	sent := 0
	f := &fake{version: "3.7.3", txn: func(ctx context.Context, _ *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		sent++
		if _, limited := ctx.Deadline(); limited {
			return nil, status.Error(codes.DeadlineExceeded, "by the server's clock")
		}
		return nil, rpctypes.ErrGRPCTimeout // it is unknown whether it was executed
	}}
	store := openOn(t, connect(t, f.start(t)), etcdtenure.Config{})
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := store.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}}, tenure.IfAbsent())
	require.ErrorIs(t, err, rpctypes.ErrTimeout)
	require.Equal(t, 1, sent)
}

// After Canceled, the client sends a request again by itself, whatever became of the first.
func TestAWriteWhoseAnswerAProxyHasCancelledIsRecognised(t *testing.T) {
	t.Parallel()
	s := start(t)
	behind := etcdserverpb.NewKVClient(connect(t, s.client).ActiveConnection())
	cancels := false
	f := &fake{version: "3.7.3", kv: behind, txn: func(ctx context.Context, r *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
		resp, err := behind.Txn(ctx, r)
		if cancels {
			cancels = false
			return nil, status.Error(codes.Canceled, "the proxy's connection has ended")
		}
		return resp, err
	}}
	store := openOn(t, connect(t, f.start(t)), etcdtenure.Config{})
	key := tenure.Key{Type: "widget", ID: "a"}
	for i, cond := range []tenure.WriteCondition{tenure.IfAbsent(), {}} {
		if i > 0 {
			obj, err := store.Get(t.Context(), key)
			require.NoError(t, err)
			cond = tenure.IfVersion(obj.Version)
		}
		cancels = true
		written, err := store.PutIf(t.Context(), tenure.Object{Key: key, Payload: fmt.Append(nil, i)}, cond)
		require.NoError(t, err)
		require.False(t, cancels)
		is, err := store.Get(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, is, written)
	}
}

// Without a leader, or with too much to do, a server has written nothing.
func TestAWriteThatWasRefusedForNowIsSentAgain(t *testing.T) {
	t.Parallel()
	for _, refusal := range []error{rpctypes.ErrGRPCNoLeader, rpctypes.ErrGRPCRequestTooManyRequests} {
		sent := 0
		f := &fake{version: "3.7.3", txn: func(context.Context, *etcdserverpb.TxnRequest) (*etcdserverpb.TxnResponse, error) {
			if sent++; sent < 3 {
				return nil, refusal
			}
			return &etcdserverpb.TxnResponse{Succeeded: true, Header: &etcdserverpb.ResponseHeader{ClusterId: 1, Revision: 7}}, nil
		}}
		store := openOn(t, connect(t, f.start(t)), etcdtenure.Config{})
		obj, err := store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}}, tenure.IfAbsent())
		require.NoError(t, err)
		require.EqualValues(t, 8, obj.Version)
		require.Equal(t, 3, sent)
	}
}

func TestACallerWithoutADeadlineDoesNotWaitForEver(t *testing.T) {
	t.Parallel()
	s := start(t)
	store := open(t, s.client)
	s.pause(t)
	sent := time.Now()
	_, err := store.Get(context.Background(), tenure.Key{Type: "a", ID: "b"})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.Less(t, time.Since(sent), 10*time.Second)
	s.resume(t)
}

// By itself the client would reconnect after 1 s, then 1.6 s, 2.6 s, and so on up to two minutes,
// during which no replica would hold a lease although the server is back.
func TestAServerThatIsDownIsTriedAgainSoonAndTheErrorSaysWhy(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var tries atomic.Int32
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			tries.Add(1)
			_ = conn.Close()
		}
	}()
	defer l.Close()
	store, err := etcdtenure.Open(t.Context(), "etcd://"+l.Addr().String(), clientv3.Config{Logger: zap.NewNop()}, etcdtenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	defer store.Close()
	for end := time.Now().Add(8 * time.Second); time.Now().Before(end); {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		_, err = store.Get(ctx, tenure.Key{Type: "a", ID: "b"})
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.GreaterOrEqual(t, tries.Load(), int32(7))
	require.ErrorContains(t, err, "Unavailable")
}

func TestAClientThatCannotLogInIsToldWhyThereIsNoConnection(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	_, err := etcdtenure.Open(ctx, "etcd://127.0.0.1:1", clientv3.Config{Logger: zap.NewNop(), Username: "app", Password: "secret"}, etcdtenure.Config{})
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, "connection refused")
	require.NotContains(t, err.Error(), "secret")
}

func TestTheNamespaceOfTheClientIsKept(t *testing.T) {
	t.Parallel()
	url := start(t).client
	plain, client := connect(t, url), connect(t, url)
	client.KV, client.Watcher = namespace.NewKV(client.KV, "ns/"), namespace.NewWatcher(client.Watcher, "ns/")
	store := openOn(t, client, etcdtenure.Config{})
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	watch := store.Watch(lease.Key()).(tenure.ChangeSubscription)
	defer watch.Stop()
	testkit.Await(t, "the watch is live", watch.Live)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	awaitChange(t, watch, term.Token())
	require.NoError(t, lease.Renew(t.Context(), term))
	found, err := store.List(t.Context(), lease.Key().Type, "", 10)
	require.NoError(t, err)
	require.Len(t, found, 1)
	require.Equal(t, lease.Key(), found[0].Key)
	all, err := plain.Get(t.Context(), "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	require.NoError(t, err)
	require.Len(t, all.Kvs, 4)
	for _, kv := range all.Kvs {
		require.True(t, strings.HasPrefix(string(kv.Key), "ns/tenure/"), "%s", kv.Key)
	}
}

// A caller's transaction is fenced by the same conditions as the store's writes.
func TestATransactionOfTheCallersIsFenced(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	_, err := store.FenceConditions(t.Context(), nil)
	require.ErrorIs(t, err, tenure.ErrInvalid)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	put := func(value string) bool {
		t.Helper()
		conditions, err := store.FenceConditions(t.Context(), term)
		require.NoError(t, err)
		resp, err := client.Txn(t.Context()).If(conditions...).Then(clientv3.OpPut("mine", value)).Commit()
		require.NoError(t, err)
		return resp.Succeeded
	}
	require.True(t, put("1"))
	require.NoError(t, lease.Renew(t.Context(), term))
	require.True(t, put("2"))
	require.NoError(t, lease.Release(t.Context(), term))
	require.False(t, put("3"))
	next, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.False(t, put("4"))
	conditions, err := store.FenceConditions(t.Context(), next)
	require.NoError(t, err)
	_, err = client.Delete(t.Context(), "tenure/epoch")
	require.NoError(t, err)
	require.NoError(t, open(t, url).Migrate(t.Context())) // after a restore revisions mean other terms
	resp, err := client.Txn(t.Context()).If(conditions...).Then(clientv3.OpPut("mine", "5")).Commit()
	require.NoError(t, err)
	require.False(t, resp.Succeeded)
	is, err := client.Get(t.Context(), "mine")
	require.NoError(t, err)
	require.Equal(t, "2", string(is.Kvs[0].Value))
}

// enableAuth lets the user app use what the README says, and other nothing.
func enableAuth(t *testing.T, url string) {
	admin, ctx := connect(t, url), t.Context()
	must := func(_ any, err error) {
		t.Helper()
		require.NoError(t, err)
	}
	must(admin.UserAdd(ctx, "root", "secret"))
	must(admin.UserGrantRole(ctx, "root", "root"))
	must(admin.RoleAdd(ctx, "tenure"))
	must(admin.RoleGrantPermission(ctx, "tenure", "tenure/", clientv3.GetPrefixRangeEnd("tenure/"), clientv3.PermissionType(clientv3.PermReadWrite)))
	must(admin.UserAdd(ctx, "app", "secret"))
	must(admin.UserGrantRole(ctx, "app", "tenure"))
	must(admin.UserAdd(ctx, "other", "secret"))
	must(admin.AuthEnable(ctx))
}

// All watches share a stream, which keeps the token with which it was opened.
func TestAWatchBeginsAfterTheTokenOfAnOlderOneHasExpired(t *testing.T) {
	t.Parallel()
	url := start(t, "--auth-token-ttl", "3").client
	enableAuth(t, url)
	store, err := etcdtenure.New(connectWith(t, clientv3.Config{Endpoints: []string{url}, Username: "app", Password: "secret"}), etcdtenure.Config{Logger: testkit.Quiet})
	require.NoError(t, err)
	t.Cleanup(func() { _ = store.Close() })
	require.NoError(t, store.Migrate(t.Context()))
	first := store.Watch(tenure.Key{Type: "lease", ID: "one"})
	defer first.Stop()
	testkit.Await(t, "the first watch is live", first.Live)
	testkit.Sleep(t.Context(), 6*time.Second) // no call renews the token meanwhile
	require.True(t, first.Live())
	second := store.Watch(tenure.Key{Type: "lease", ID: "two"})
	defer second.Stop()
	testkit.Await(t, "the second watch is live", second.Live)
}

func TestTheUserNeedsOnlyWhatTheReadmeSays(t *testing.T) {
	t.Parallel()
	url := start(t).client
	enableAuth(t, url)
	ctx := t.Context()
	must := func(_ any, err error) {
		t.Helper()
		require.NoError(t, err)
	}

	open := func(url string, client clientv3.Config) (*etcdtenure.Store, error) {
		client.Logger = zap.NewNop()
		store, err := etcdtenure.Open(ctx, url, client, etcdtenure.Config{Logger: testkit.Quiet})
		if err == nil {
			t.Cleanup(func() { _ = store.Close() })
			err = store.Migrate(ctx)
		}
		return store, err
	}
	host := strings.TrimPrefix(url, "http://")
	for _, user := range []string{"", "app:wrong@", "other:secret@"} {
		_, err := open("etcd://"+user+host, clientv3.Config{})
		require.ErrorIs(t, err, tenure.ErrSetup, "user %q", user)
		require.NotContains(t, err.Error(), "wrong")
	}
	_, err := open("etcd://"+host, clientv3.Config{Username: "app", Password: "secret"})
	require.NoError(t, err)
	store, err := open("etcd://app:secret@"+host, clientv3.Config{Username: "other", Password: "secret"})
	require.NoError(t, err)
	require.Equal(t, "prefix tenure/ on "+host, store.String())
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	watch := store.Watch(lease.Key())
	testkit.Await(t, "the watch is live", watch.Live)
	term, err := lease.TryAcquire(ctx)
	require.NoError(t, err)
	fenced, err := store.Fence(term)
	require.NoError(t, err)
	must(fenced.PutIf(ctx, tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Name: "a"}, tenure.IfAbsent()))
	found, err := store.List(ctx, "widget", "", 10)
	require.NoError(t, err)
	require.Len(t, found, 1)
	staysLive(t, watch)
	require.NoError(t, lease.Release(ctx, term))
}

// certificates writes a key and a certificate for 127.0.0.1. It returns their files, and a config
// with which client and server know each other.
func certificates(t *testing.T) (cert, key string, client *tls.Config) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), crand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(crand.Reader, template, template, &private.PublicKey, private)
	require.NoError(t, err)
	pkcs8, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	keyPEM := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8})
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	require.NoError(t, errors.Join(os.WriteFile(cert, certPEM, 0o600), os.WriteFile(key, keyPEM, 0o600)))
	pair, err := tls.X509KeyPair(certPEM, keyPEM)
	require.NoError(t, err)
	roots := x509.NewCertPool()
	require.True(t, roots.AppendCertsFromPEM(certPEM))
	return cert, key, &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{pair}}
}

func TestAServerWithTLSAsksForTheClientsCertificate(t *testing.T) {
	t.Parallel()
	cert, key, config := certificates(t)
	s := newServer(t, "--cert-file", cert, "--key-file", key, "--client-cert-auth", "--trusted-ca-file", cert)
	s.URL.Scheme = "https"
	s.begin(t)
	url := "etcds://" + s.URL.Host
	migrate := func(url string, config *tls.Config) error {
		store, err := etcdtenure.Open(t.Context(), url, clientv3.Config{TLS: config, Logger: zap.NewNop()}, etcdtenure.Config{Logger: testkit.Quiet})
		require.NoError(t, err)
		defer store.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
		defer cancel()
		return store.Migrate(ctx)
	}
	testkit.Await(t, "the server accepts the certificate", func() bool { return migrate(url, config) == nil })
	require.NoError(t, migrate(url+"/?ca="+cert+"&cert="+cert+"&key="+key, nil))
	require.Error(t, migrate(url, &tls.Config{RootCAs: config.RootCAs}))
	require.Error(t, migrate(url+"/?ca="+cert, nil))
	require.Error(t, migrate(url, nil))
}
