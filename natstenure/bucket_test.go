package natstenure_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/stretchr/testify/require"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/natstenure"
	"github.com/tenurelib/tenure/proof/kit"
	"github.com/tenurelib/tenure/storetest"
)

// keepsContract tests stores in buckets of a server.
func keepsContract(t *testing.T, url string) {
	js := connect(t, url)
	buckets := 0
	next := func() natstenure.Config {
		buckets++
		return natstenure.Config{Bucket: fmt.Sprint("b", buckets)}
	}
	t.Run("contract", func(t *testing.T) {
		storetest.Run(t, func(t *testing.T) tenure.Store { return openOn(t, js, next()) })
	})
	t.Run("names move", func(t *testing.T) { kit.RunNamesMove(t, openOn(t, js, next())) })
	t.Run("names are given once", func(t *testing.T) {
		cfg := next()
		kit.RunNamesAreGivenOnce(t, func() *natstenure.Store { return openOn(t, connect(t, url), cfg) })
	})
	t.Run("keys are listed", func(t *testing.T) { kit.RunKeysAreListed(t, openOn(t, js, next())) })
	t.Run("updates", func(t *testing.T) {
		cfg := next()
		kit.RunConcurrentUpdates(t, func(int) *natstenure.Store { return openOn(t, connect(t, url), cfg) })
	})
}

func TestAStoreInABucketKeepsTheContract(t *testing.T) {
	t.Parallel()
	keepsContract(t, start(t).ClientURL())
}

var (
	_ = context.Background
	_ = json.Marshal
	_ = errors.New
	_ atomic.Int32
	_ time.Time
	_ nats.Msg
	_ jetstream.JetStream
	_ = require.NoError
)

// The last versions that the module proxy has of 2.10 and 2.11.
var oldVersions = []string{"v2.10.27", "v2.11.17"}

func TestABucketOnAnOlderServerKeepsTheContract(t *testing.T) {
	for _, version := range oldVersions {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			c := &child{binary: oldBinary(t, version), dir: quickDir(t)}
			c.start(t)
			t.Cleanup(c.kill)
			keepsContract(t, c.url)

			store, err := natstenure.New(connect(t, c.url), natstenure.Config{Logger: kit.Quiet})
			require.NoError(t, err)
			defer store.Close()
			err = store.Migrate(t.Context())
			require.ErrorIs(t, err, tenure.ErrSetup, "a stream of the store's own layout needs atomic batches")
			require.ErrorContains(t, err, "Config.Bucket needs only 2.10")

			var jobs kit.Jobs
			const ttl = 3 * time.Second
			cfg := natstenure.Config{Bucket: "leases"}
			a, b := kit.StartReplica(t, &jobs, openOn(t, connect(t, c.url), cfg), "a", ttl), kit.StartReplica(t, &jobs, openOn(t, connect(t, c.url), cfg), "b", ttl)
			kit.RunRestarts(t, &jobs, a, b, 2, func() { c.kill(); c.start(t) })
		})
	}
}

// Two writers at one revision once both succeeded in a cluster, before 2.10.
func TestAReplicatedBucketOnAnOlderServerLosesNoUpdate(t *testing.T) {
	for _, version := range oldVersions {
		t.Run(version, func(t *testing.T) {
			cluster := startClusterOf(t, oldBinary(t, version))
			cfg := natstenure.Config{Bucket: "b", Replicas: 3}
			kit.RunConcurrentUpdates(t, func(i int) *natstenure.Store { return openOn(t, connect(t, cluster.servers[i%3].url), cfg) })
			kit.RunNamesMove(t, openOn(t, connect(t, cluster.servers[0].url), natstenure.Config{Bucket: "c", Replicas: 3}))
		})
	}
}
