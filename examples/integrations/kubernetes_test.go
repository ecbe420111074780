package integrations

import (
	"debug/elf"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

func TestTheManifestOfTheDocumentIsADeploymentThatFitsTheProgram(t *testing.T) {
	manifest := read(t, "../kubernetes/periodic.yaml")
	if !strings.Contains(read(t, "../../docs/deploy.md"), "```yaml\n"+manifest+"```\n") {
		t.Error("docs/deploy.md does not show the manifest")
	}
	var deployment appsv1.Deployment
	must(t, yaml.UnmarshalStrict([]byte(manifest), &deployment)) // refuses fields that the API does not have
	if deployment.APIVersion != "apps/v1" || deployment.Kind != "Deployment" {
		t.Errorf("it is a %s of %s", deployment.Kind, deployment.APIVersion)
	}
	if selected, labels := deployment.Spec.Selector.MatchLabels, deployment.Spec.Template.Labels; !reflect.DeepEqual(selected, labels) {
		t.Errorf("it selects pods with %v, and makes pods with %v", selected, labels)
	}

	pod := deployment.Spec.Template.Spec
	container := pod.Containers[0]
	program := read(t, "../periodic/main.go")
	for _, probe := range []string{container.LivenessProbe.HTTPGet.Path, container.ReadinessProbe.HTTPGet.Path} {
		if !strings.Contains(program, `http.HandleFunc("`+probe+`"`) {
			t.Errorf("the program does not answer the probe of %s", probe)
		}
	}
	for _, probe := range []string{container.LivenessProbe.HTTPGet.Port.StrVal, container.ReadinessProbe.HTTPGet.Port.StrVal} {
		if probe != container.Ports[0].Name {
			t.Errorf("a probe asks on port %q, and the container has %q", probe, container.Ports[0].Name)
		}
	}
	for _, variable := range container.Env {
		if variable.Name != "TENURE_REPLICA_ID" && !strings.Contains(program, `os.Getenv("`+variable.Name+`")`) {
			t.Errorf("the program does not read %s", variable.Name)
		}
	}
	const release = 10 * time.Second // at most, while the database hangs
	if grace := time.Duration(*pod.TerminationGracePeriodSeconds) * time.Second; grace <= release {
		t.Errorf("a grace period of %v leaves the job no time to return", grace)
	}
	scraped := deployment.Spec.Template.Annotations
	if port := strconv.Itoa(int(container.Ports[0].ContainerPort)); scraped["prometheus.io/port"] != port {
		t.Errorf("metrics are scraped from port %s, and the container has %s", scraped["prometheus.io/port"], port)
	}
	if !strings.Contains(program, `http.Handle("`+scraped["prometheus.io/path"]+`"`) {
		t.Errorf("the program has no metrics at %s", scraped["prometheus.io/path"])
	}
}

func TestTheOtherManifestOfTheDocumentIsThatOfAPodWhichRunsTheCommand(t *testing.T) {
	_, rest, _ := strings.Cut(read(t, "../../docs/command.md"), "## In a container")
	_, rest, _ = strings.Cut(rest, "```yaml\n")
	manifest, _, _ := strings.Cut(rest, "```\n")
	var pod corev1.PodTemplateSpec
	must(t, yaml.UnmarshalStrict([]byte(manifest), &pod))
	if command := pod.Spec.Containers[0].Command; len(command) < 2 || command[0] != "tenure" || command[1] != "run" {
		t.Errorf("the pod runs %q", command)
	}
}

func TestTheDockerfileOfTheDocumentBuildsAProgramThatNeedsNoLibraries(t *testing.T) {
	dockerfile := read(t, "../kubernetes/Dockerfile")
	found := regexp.MustCompile(`(?m)^RUN CGO_ENABLED=0 (go build .*) -o /periodic \.$`).FindStringSubmatch(dockerfile)
	if found == nil {
		t.Fatal("it does not build the program without cgo")
	}
	program := filepath.Join(t.TempDir(), "periodic")
	build := exec.Command("go", append(strings.Fields(found[1])[1:], "-o", program, ".")...)
	build.Dir = filepath.FromSlash("../periodic")
	build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOWORK=off")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	file, err := elf.Open(program)
	must(t, err)
	defer file.Close()
	if libraries, err := file.ImportedLibraries(); err != nil || len(libraries) > 0 {
		t.Errorf("it needs %q (%v), which the image does not have", libraries, err)
	}
	for _, part := range file.Progs {
		if part.Type == elf.PT_INTERP {
			t.Error("it needs a dynamic loader, which the image does not have")
		}
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.FromSlash(path))
	must(t, err)
	return string(text)
}
