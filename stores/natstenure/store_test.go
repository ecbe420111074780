package natstenure_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
	"github.com/tenurelib/tenure/storetest"
)

func TestTheStoreKeepsTheContract(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	streams := 0
	storetest.Run(t, func(t *testing.T) tenure.Store {
		streams++
		return openOn(t, js, natstenure.Config{Stream: fmt.Sprint("S", streams)})
	})
}

func TestOnlyPublicPackagesOfTheRootModuleAreImported(t *testing.T) { testkit.OnlyPublicImports(t) }

func TestANameMovesOnlyFromAnObjectThatHasGivenItUp(t *testing.T) {
	testkit.RunNamesMove(t, open(t, start(t).ClientURL()))
}

func TestConcurrentWritersNeverGiveOneNameTwice(t *testing.T) {
	url := start(t).ClientURL()
	testkit.RunNamesAreGivenOnce(t, func() *natstenure.Store { return open(t, url) })
}

func TestAKeyOfAnyLengthIsListed(t *testing.T) {
	testkit.RunKeysAreListed(t, open(t, start(t).ClientURL()))
}

func TestAMessageOfAnotherProgramIsAnObjectOfUnknownContent(t *testing.T) {
	url := start(t).ClientURL()
	js, store := connect(t, url), open(t, url)
	_, err := js.Publish(t.Context(), "TENURE.o.reconciler_lease.singleton.t", []byte("held by me"))
	require.NoError(t, err)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{TTL: 500 * time.Millisecond})
	_, err = lease.AcquireOrSteal(t.Context())
	require.ErrorIs(t, err, tenure.ErrHeld)
	require.ErrorContains(t, err, "unknown")
	obj, err := store.Get(t.Context(), lease.Key())
	require.NoError(t, err)
	require.Equal(t, "held by me", string(obj.Payload))
	time.Sleep(500 * time.Millisecond)
	_, err = lease.AcquireOrSteal(t.Context())
	require.NoError(t, err)
}

func TestAnObjectThatIsTooLargeForTheServerIsRefused(t *testing.T) {
	store := open(t, startWith(t, &server.Options{JetStream: true}).ClientURL())
	obj := tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Payload: make([]byte, tenure.MaxPayload-4096)}
	_, err := store.PutIf(t.Context(), obj, tenure.IfAbsent())
	require.NoError(t, err)
	obj.Payload = make([]byte, tenure.MaxPayload)
	_, err = store.PutIf(t.Context(), obj, tenure.Unconditional())
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "max_payload")
}

func TestAConfigThatCannotBeIsRefused(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	_, err := natstenure.New(nil, natstenure.Config{})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	_, err = natstenure.New(js, natstenure.Config{Stream: "a.b", Replicas: 9})
	require.ErrorIs(t, err, tenure.ErrInvalid)
	require.ErrorContains(t, err, "Stream")
	require.ErrorContains(t, err, "Replicas")
	_, err = natstenure.New(js, natstenure.Config{Stream: "a", Bucket: "b"})
	require.ErrorIs(t, err, tenure.ErrInvalid)
}

func TestAStreamThatCouldLoseOrHideAWriteIsRefused(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	streams := 0
	for what, spoil := range map[string]func(*jetstream.StreamConfig){
		"":             func(*jetstream.StreamConfig) {},
		"subjects S":   func(c *jetstream.StreamConfig) { c.Subjects = []string{c.Name + ".o.>"} },
		"file storage": func(c *jetstream.StreamConfig) { c.Storage = jetstream.MemoryStorage },
		"persist mode": func(c *jetstream.StreamConfig) {
			c.PersistMode, c.AllowAtomicPublish = jetstream.AsyncPersistMode, false
		},
		"retention":    func(c *jetstream.StreamConfig) { c.Retention = jetstream.InterestPolicy },
		"maximum age":  func(c *jetstream.StreamConfig) { c.MaxAge = time.Hour },
		"discard new":  func(c *jetstream.StreamConfig) { c.Discard, c.MaxMsgs = jetstream.DiscardOld, 1000 },
		"atomic batch": func(c *jetstream.StreamConfig) { c.AllowAtomicPublish = false },
		"replaced by":  func(c *jetstream.StreamConfig) { c.DiscardNewPerSubject = true },
		"direct gets":  func(c *jetstream.StreamConfig) { c.AllowDirect = true },
		"mirror":       func(c *jetstream.StreamConfig) { c.Sources = []*jetstream.StreamSource{{Name: "other"}} },
	} {
		t.Run(what, func(t *testing.T) {
			streams++
			name := fmt.Sprint("S", streams)
			cfg := jetstream.StreamConfig{
				Name: name, Subjects: []string{name + ".>"}, AllowAtomicPublish: true, MaxMsgsPerSubject: 1, Discard: jetstream.DiscardNew,
			}
			spoil(&cfg)
			_, err := js.CreateStream(t.Context(), cfg)
			require.NoError(t, err)
			store, err := natstenure.New(js, natstenure.Config{Stream: name, Logger: testkit.Quiet})
			require.NoError(t, err)
			defer store.Close()
			err = store.Migrate(t.Context())
			_, getErr := store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
			if what == "" {
				require.NoError(t, err)
				require.ErrorIs(t, getErr, tenure.ErrNotFound)
				return
			}
			require.ErrorIs(t, err, tenure.ErrSetup)
			require.ErrorContains(t, err, what)
			require.ErrorIs(t, getErr, tenure.ErrSetup)
		})
	}
}

func TestWithoutAStreamTheErrorSaysWhatToDo(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	store, err := natstenure.New(js, natstenure.Config{})
	require.NoError(t, err)
	defer store.Close()
	_, err = store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
	require.ErrorIs(t, err, tenure.ErrSetup)
	require.ErrorContains(t, err, "Migrate")
}

// No real server of that age is available. A server says its version first, and that is enough.
func TestAServerThatIsTooOldIsRefused(t *testing.T) {
	for _, test := range []struct {
		version string
		cfg     natstenure.Config
		wants   string // of the error; empty: none
	}{
		{"2.11.9", natstenure.Config{}, "2.12.0"}, {"2.12.0", natstenure.Config{}, ""}, {"3.0.1", natstenure.Config{}, ""},
		{"2.10.27", natstenure.Config{Bucket: "b"}, "2.11.2"}, {"2.11.1", natstenure.Config{Bucket: "b"}, "2.11.2"},
		{"2.11.2", natstenure.Config{Bucket: "b"}, ""}, {"2.14.0-preview.1", natstenure.Config{Bucket: "b"}, ""},
	} {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		defer l.Close()
		go func() {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			defer conn.Close()
			fmt.Fprintf(conn, `INFO {"server_id":"x","version":%q,"proto":1,"headers":true,"max_payload":1048576}`+"\r\n", test.version)
			for lines := bufio.NewScanner(conn); lines.Scan(); {
				if lines.Text() == "PING" {
					fmt.Fprint(conn, "PONG\r\n")
				}
			}
		}()
		test.cfg.Logger = testkit.Quiet
		store, err := natstenure.New(connect(t, "nats://"+l.Addr().String()), test.cfg)
		require.NoError(t, err)
		limit := time.Minute
		if test.wants == "" { // it answers nothing more
			limit = 300 * time.Millisecond
		}
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		defer cancel()
		err = store.Migrate(ctx)
		if test.wants == "" {
			require.ErrorIs(t, err, context.DeadlineExceeded)
			continue
		}
		require.ErrorIs(t, err, tenure.ErrSetup)
		require.ErrorContains(t, err, "must have "+test.wants+" or later")
	}
}

func TestMigrateWarnsUnlessEachWriteIsSynced(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	for _, synced := range []bool{false, true} {
		var log bytes.Buffer
		store, err := natstenure.New(js, natstenure.Config{SyncAlways: synced, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		require.NoError(t, err)
		defer store.Close()
		require.NoError(t, store.Migrate(t.Context()))
		require.Equal(t, !synced, strings.Contains(log.String(), "sync_interval: always"))
	}
}

func TestMigrateMayBeCalledByManyAtOnce(t *testing.T) {
	js := connect(t, start(t).ClientURL())
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() {
			store, err := natstenure.New(js, natstenure.Config{SyncAlways: true})
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
}

func TestTheConnectionsCredentialsAreTheCallersAndNeedOnlyWhatTheReadmeSays(t *testing.T) {
	for name, cfg := range map[string]natstenure.Config{"stream": {}, "bucket": {Bucket: "leases"}} {
		t.Run(name, func(t *testing.T) {
			if cfg.Bucket == "" {
				needsOnly(t, cfg, "TENURE", "TENURE.>")
			} else {
				needsOnly(t, cfg, "KV_leases", "$KV.leases.>", "$JS.API.DIRECT.GET.KV_leases.>")
			}
		})
	}
}

func needsOnly(t *testing.T, cfg natstenure.Config, stream string, more ...string) {
	s := startWith(t, &server.Options{
		JetStream: true,
		Users: []*server.User{
			{Username: "admin", Password: "secret"},
			{Username: "app", Password: "secret", Permissions: &server.Permissions{
				Publish: &server.SubjectPermission{Allow: append(more,
					"$JS.API.STREAM.INFO."+stream, "$JS.API.STREAM.MSG.GET."+stream,
					"$JS.API.CONSUMER.CREATE."+stream+".>", "$JS.API.CONSUMER.DELETE."+stream+".>",
				)},
				Subscribe: &server.SubjectPermission{Allow: []string{"_MINE.>"}},
			}},
		},
	})
	_, err := nats.Connect(s.ClientURL())
	require.Error(t, err)
	openOn(t, connect(t, s.ClientURL(), nats.UserInfo("admin", "secret")), cfg)

	var denied atomic.Int32
	js := connect(t, s.ClientURL(), nats.UserInfo("app", "secret"), nats.CustomInboxPrefix("_MINE"),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { t.Log(err); denied.Add(1) }))
	store := openOn(t, js, cfg)
	lease := testkit.NewLease(t, store, tenure.LeaseConfig{})
	watch := store.Watch(lease.Key())
	testkit.Await(t, "the watch is live", watch.Live)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	fenced := tenure.Store(store)
	if cfg.Bucket == "" {
		fenced, err = store.Fence(term)
		require.NoError(t, err)
	}
	_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "a"}, Name: "a"}, tenure.IfAbsent())
	require.NoError(t, err)
	for _, store := range []*natstenure.Store{store, store.Outdated()} {
		found, err := store.List(t.Context(), "widget", "", 10)
		require.NoError(t, err)
		require.Len(t, found, 1)
	}
	require.NoError(t, lease.Release(t.Context(), term))
	watch.Stop()
	require.NoError(t, store.Close()) // which waits until the consumer is removed
	require.Zero(t, denied.Load())
}
