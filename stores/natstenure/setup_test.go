package natstenure_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
	"github.com/tenurelib/tenure/stores/natstenure"
)

func TestWithoutJetStreamTheErrorSaysWhatToDo(t *testing.T) {
	t.Parallel()
	with, without := server.NewAccount("with"), server.NewAccount("without")
	for what, test := range map[string]struct {
		opts *server.Options
		as   []nats.Option
		says string
	}{
		"server": {&server.Options{}, nil, "no server that the client reaches has JetStream enabled"},
		"account": {&server.Options{JetStream: true, Accounts: []*server.Account{with, without},
			Users: []*server.User{{Username: "app", Password: "secret", Account: without}}},
			[]nats.Option{nats.UserInfo("app", "secret")}, "account that the client connects to must have JetStream"},
	} {
		t.Run(what, func(t *testing.T) {
			store, err := natstenure.New(connect(t, startWith(t, test.opts).ClientURL(), test.as...), natstenure.Config{Logger: testkit.Quiet})
			require.NoError(t, err)
			defer store.Close()
			_, getErr := store.Get(t.Context(), tenure.Key{Type: "a", ID: "b"})
			for _, err := range []error{store.Migrate(t.Context()), getErr} {
				require.ErrorIs(t, err, tenure.ErrSetup)
				require.ErrorContains(t, err, test.says)
			}
		})
	}
}

// A full server refuses renewals, so that the holder ends its term; it holds again when there is
// room. A full stream may accept a renewal in place of the last one.
func TestAFullStreamIsNamedAndGoesOnWhenThereIsRoom(t *testing.T) {
	t.Parallel()
	for what, test := range map[string]struct {
		opts   *server.Options
		limit  int64 // of the stream
		remedy string
	}{
		"stream": {&server.Options{JetStream: true}, 64 << 10, "max_bytes"},
		"server": {&server.Options{JetStream: true, JetStreamMaxStore: 128 << 10}, -1, "max_file_store"},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			js := connect(t, startWith(t, test.opts).ClientURL())
			store := openOn(t, js, natstenure.Config{})
			limit := func(bytes int64) {
				stream, err := js.Stream(t.Context(), "TENURE")
				require.NoError(t, err)
				cfg := stream.CachedInfo().Config
				cfg.MaxBytes = bytes
				_, err = js.UpdateStream(t.Context(), cfg)
				require.NoError(t, err)
			}
			if test.limit > 0 {
				limit(test.limit)
			}
			var jobs testkit.Jobs
			a := testkit.StartReplica(t, &jobs, store, "a", 900*time.Millisecond)
			testkit.Await(t, "a holds", a.IsHolder)
			token := a.Status().Token
			var all []tenure.Object
			var err error
			for _, size := range []int{4 << 10, 0} { // until there is no room even for a small object
				for {
					var obj tenure.Object
					key := tenure.Key{Type: "widget", ID: fmt.Sprint(len(all))}
					if obj, err = store.PutIf(t.Context(), tenure.Object{Key: key, Payload: make([]byte, size)}, tenure.IfAbsent()); err != nil {
						break
					}
					all = append(all, obj)
				}
				require.ErrorIs(t, err, tenure.ErrSetup)
				require.ErrorContains(t, err, test.remedy)
			}
			_, err = store.Get(t.Context(), all[0].Key)
			require.NoError(t, err)
			if test.limit > 0 {
				limit(-1)
				_, err = store.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "widget", ID: "more"}}, tenure.IfAbsent())
				require.NoError(t, err)
				testkit.Await(t, "a holds", a.IsHolder)
				require.EqualValues(t, 1, jobs.Most.Load())
				return
			}
			testkit.Await(t, "the term has ended", func() bool { return !a.IsHolder() && jobs.Running.Load() == 0 })
			stream, err := js.Stream(t.Context(), "TENURE")
			require.NoError(t, err)
			for _, obj := range all[:3] { // there is no room even to record their deletion
				require.NoError(t, stream.Purge(t.Context(), jetstream.WithPurgeSubject("TENURE.o.widget."+obj.Key.ID+".*")))
			}
			testkit.Await(t, "a holds again", func() bool { return a.IsHolder() && a.Status().Token > token })
			require.EqualValues(t, 1, jobs.Most.Load())
		})
	}
}
