//go:build unix

package etcdtenure_test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit/golden"
)

func TestTheKeysAndValuesInEtcdStayAsTheyAre(t *testing.T) {
	t.Parallel()
	url := start(t).client
	client, store := connect(t, url), open(t, url)
	lease, err := tenure.NewLease(store, tenure.LeaseConfig{
		Key: tenure.Key{Type: "lease", ID: "nightly report"}, Holder: "replica-a", Labels: map[string]string{"address": "10.0.0.1:8080"},
	})
	require.NoError(t, err)
	term, err := lease.TryAcquire(t.Context())
	require.NoError(t, err)
	require.NoError(t, lease.Renew(t.Context(), term))
	fenced, err := store.Fence(term)
	require.NoError(t, err)
	_, err = fenced.PutIf(t.Context(), tenure.Object{Key: tenure.Key{Type: "a/b", ID: "c/7"}, Name: "größe", Payload: []byte("a payload")}, tenure.IfAbsent())
	require.NoError(t, err)

	is, err := client.Get(t.Context(), "", clientv3.WithPrefix())
	require.NoError(t, err)
	var got strings.Builder
	hashes := map[string]bool{} // of payloads
	for _, kv := range is.Kvs {
		_, payload, _ := bytes.Cut(kv.Value, []byte("\n"))
		hash := sha256.Sum256(payload)
		hashes[string(hash[:])] = true
		if hashes[string(kv.Value)] {
			kv.Value = []byte("SHA-256")
		}
		fmt.Fprintf(&got, "%s\n%s\n\n", kv.Key, kv.Value)
	}
	masked := regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f-]{27}`).ReplaceAllString(got.String(), "TERM")
	masked = regexp.MustCompile(`"write":"[A-Z2-7]{26}"`).ReplaceAllString(masked, `"write":"RANDOM"`)
	golden.Compare(t, "keys", regexp.MustCompile(`\b\d{13,}\b`).ReplaceAllString(masked, "NUMBER"))
}
