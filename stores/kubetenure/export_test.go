package kubetenure

import (
	"testing"
	"time"
)

// SetServiceAccount says where a pod's files are, until the test ends.
func SetServiceAccount(t *testing.T, dir string) {
	was := serviceAccount
	serviceAccount = dir
	t.Cleanup(func() { serviceAccount = was })
}

// SetToken makes a store use a token as if it had read it that long ago.
func SetToken(s *Store, text string, ago time.Duration) {
	s.client.token.mu.Lock()
	defer s.client.token.mu.Unlock()
	s.client.token.text, s.client.token.read = text, time.Now().Add(-ago)
}
